"""Stop strings as a rule over token ids: a response ends with the first token that completes one.

The text of a response is the concatenation of its tokens' bytes, so an automaton over bytes (Aho
and Corasick 1975) that reads a whole token at a time detects stop strings: an engine needs no
tokenizer, and looks up the next state from (state, token). As with stop tokens, the end of a
response is a function of its tokens up to there, so exactness is not affected (docs/exactness.md).

Example:
    >>> rule = StopRule.of(["</a>"], [b"x", b"</", b"a>", b"</a>!"])
    >>> rule.follow(rule.start, np.array([0, 1, 0, 1, 2, 0]))
    (5, 0)
    >>> rule.follow(rule.start, np.array([3]))[0]
    1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray
from asyncrl.wire.transport.paths import MAX_STOP_BYTES

kernel = kernels_of("engine/sampling")

ENDED = -1
"""The state after a stop string."""


@dataclass(frozen=True, slots=True, eq=False)
class StopRule:
    """Detects stop strings in a response of token ids. Made by `of`."""

    strings: tuple[str, ...]
    table: NDArray[np.int16]
    """`[S, C]` the state after a token of a class; `ENDED`: the response has ended."""
    classes: IntArray
    """`[V]` class of each token: tokens of a class do the same in every state. Tokens beyond V have
    no text."""

    start: int = 0

    @classmethod
    def of(cls, strings: Sequence[str], token_bytes: Sequence[bytes]) -> StopRule:
        """Compile stop strings for a vocabulary of V tokens with texts `token_bytes`.

        Raises ValueError for no string, an empty one, or more than `MAX_STOP_BYTES` bytes.
        """
        patterns = [string.encode() for string in strings]
        if not patterns or not all(patterns):
            raise ValueError("stop strings must not be empty")
        if sum(map(len, patterns)) > MAX_STOP_BYTES:
            raise ValueError(f"stop strings have more than {MAX_STOP_BYTES} bytes together")
        columns = _after_tokens(_automaton(patterns), token_bytes)
        classes, examples = _classes(columns)
        return cls(tuple(strings), np.ascontiguousarray(columns[:, examples]), classes)

    def follow(self, state: int, tokens: NDArray[np.integer]) -> tuple[int | None, int]:
        """Read tokens; return their number up to the response's end, or None, and the new state."""
        count, state = _follow(self.table, self.classes, state, np.asarray(tokens, np.int64))
        return (count, self.start) if state == ENDED else (None, int(state))


def _automaton(patterns: Sequence[bytes]) -> NDArray[np.int16]:
    """Return `[S, 256]` states after a byte, each the longest suffix that begins a pattern."""
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for pattern in patterns:
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(False)
            node = children[node][byte]
        ends[node] = True
    table = np.zeros((len(children), 256), np.int16)
    fallback = [0] * len(children)
    waiting = deque([0])
    while waiting:  # nodes in order of depth
        node = waiting.popleft()
        ends[node] |= ends[fallback[node]]
        if node:
            table[node] = table[fallback[node]]
        for byte, child in children[node].items():
            fallback[child] = int(table[node, byte]) if node else 0
            table[node, byte] = child
            waiting.append(child)
    final = np.flatnonzero(ends)
    table[np.isin(table, final)] = ENDED
    return table


def _after_tokens(table: NDArray[np.int16], token_bytes: Sequence[bytes]) -> NDArray[np.int16]:
    """Return `[S, V]` states after each token, from each state."""
    lengths = np.array([len(one) for one in token_bytes])
    longest_first = np.argsort(-lengths, kind="stable")
    padded = np.zeros((len(lengths), max(1, int(lengths.max()))), np.uint8)
    for row, token in enumerate(longest_first.tolist()):
        padded[row, : lengths[token]] = np.frombuffer(token_bytes[token], np.uint8)
    states = np.repeat(np.arange(len(table), dtype=np.int16)[:, None], len(lengths), axis=1)
    ordered = lengths[longest_first]
    for place in range(int(lengths.max())):
        count = int(np.searchsorted(-ordered, -place, side="left"))
        part = states[:, :count]
        after = table[part, padded[:count, place]]
        states[:, :count] = np.where(part == ENDED, ENDED, after)
    out = np.empty_like(states)
    out[:, longest_first] = states
    return out


def _classes(columns: NDArray[np.int16]) -> tuple[IntArray, NDArray[np.int64]]:
    """Return `[V]` classes of equal columns, and `[C]` a column of each class."""
    classes = np.zeros(columns.shape[1], np.int64)
    examples = np.zeros(1, np.int64)
    for row in columns:
        codes = classes * (len(columns) + 1) + row - ENDED
        _, examples, classes = np.unique(codes, return_index=True, return_inverse=True)
    return classes.astype(np.int32), examples


@kernel
def _follow(
    table: NDArray[np.int16], classes: IntArray, state: int, tokens: NDArray[np.int64]
) -> tuple[int, int]:
    for place in range(len(tokens)):
        if tokens[place] < len(classes):  # a padded vocabulary's last tokens have no text
            state = table[state, classes[tokens[place]]]
        if state == ENDED:
            return place + 1, state
    return len(tokens), state


@kernel
def cut_rows(
    table: NDArray[np.int16],
    classes: IntArray,
    mine: NDArray[np.bool_],
    states: IntArray,
    row: NDArray[np.int64],
    step: NDArray[np.int64],
    tokens: NDArray[np.int64],
    kept: IntArray,
    stopped: NDArray[np.bool_],
) -> None:
    """Follow the new tokens of all rows of a batch; shorten `kept` where a row ends.

    `table` and `classes` are those of the rule, which the rows `mine` have. Updated are `states`
    and `kept` `[n]` (tokens that each row appends), and set is `stopped` `[n]` (the last of them
    ends the row). `tokens`, `row` (in order) and `step` (place among the row's new tokens) are
    `[M]`.
    """
    for place in range(len(tokens)):
        r = row[place]
        if not mine[r] or step[place] >= kept[r] or tokens[place] >= len(classes):
            continue
        state = table[states[r], classes[tokens[place]]]
        if state == ENDED:
            kept[r] = step[place] + 1
            stopped[r] = True
        else:
            states[r] = state
