"""Tokens that vLLM has generated and that requests have not reported yet, as arrays.

A step's table (`engine.vllm.extras.StepTable`) has the new tokens of all requests. `record` copies
them to the rows of the requests in one compiled loop. A chunk is then a slice of one row.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.stopping import StopRule, cut_rows
from engine.vllm.extras import StepTable
from rollout.jit import Compiler
from rollout.trajectory import ByteArray, FloatArray, IntArray, Provenance

kernel = Compiler(Path(__file__).parent)

NO_ROW = -1
_DRAFTED, _SAMPLED = int(Provenance.DRAFTED), int(Provenance.SAMPLED)

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Tokens(NamedTuple):
    """n tokens of one request with everything that is reported of them."""

    tokens: IntArray
    """`[n]`"""
    logprobs: FloatArray
    """`[n]`"""
    topk_ids: IntArray
    """`[n, K]`, padded with -1."""
    topk_logprobs: FloatArray
    """`[n, K]`, padded with -inf."""
    provenance: ByteArray
    """`[n]`"""


class Unreported:
    """The rows of requests that generate: R rows of C tokens with the top K; all three grow.

    Provenance: a step of n tokens accepted n - 1 drafts and drew one token. If the response ended
    inside the accepted drafts, all its tokens are drafts (`correct_last`).
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._ones: Index = np.ones(0, np.int64)
        self._most = 0  # tokens of a row, at most
        self._rules: dict[int, StopRule] = {}
        self._ids: IntArray = np.empty((0, 0, 1), np.int32)
        self._logprobs: FloatArray = np.empty((0, 0, 1), np.float32)
        self._provenance: ByteArray = np.empty((0, 0), np.uint8)
        self._accepted: Index = np.empty(0, np.int64)
        self._state: IntArray = np.empty(0, np.int32)
        self.count: Index = np.empty(0, np.int64)
        """`[R]` tokens to report."""
        self.begun: Flags = np.empty(0, np.bool_)
        """`[R]` whether the request has reported anything."""
        self.finite: Flags = np.empty(0, np.bool_)
        """`[R]` whether the log-probabilities of its tokens are numbers."""
        self.recorded = 0
        """Tokens since the start."""

    def open(self, rule: StopRule | None = None, state: int = 0) -> int:
        """Take a row for a request.

        Args:
            rule: its stop strings.
            state: of the rule, after what the response resumes from.
        """
        if not self._free:
            have = len(self.count)
            self._resize(max(16, 2 * have), *self._ids.shape[1:])
            self._free = list(range(len(self.count) - 1, have - 1, -1))
        row = self._free.pop()
        self.count[row] = self._accepted[row] = 0
        self.begun[row], self.finite[row] = False, True
        if rule is not None:
            self._rules[row], self._state[row] = rule, state
        return row

    def close(self, row: int) -> None:
        """Give a row back; what it holds is forgotten."""
        self._rules.pop(row, None)
        self.count[row] = 0
        self._free.append(row)

    def record(self, rows: Index, table: StepTable) -> Index:
        """Append what a step generated.

        Args:
            rows: `[R']` of the outputs of the step's message; NO_ROW: not wanted.
            table: of R' outputs.

        Returns:
            Indices of the outputs whose response was ended by a stop string. What the step
            generated after it is dropped.
        """
        if len(self._ones) < len(rows):
            self._ones = np.ones(2 * len(rows), np.int64)
        plain = table.counts is None
        drawn = self._ones[: len(rows)] if plain else np.array(table.counts, np.int64)
        kept, ended = drawn, np.empty(0, np.int64)
        if self._rules:
            kept, ended = self._cut(rows, table, drawn)
        self._make_room(1 if plain else int(drawn.max(initial=0)), table.ids.shape[1])
        for array in table[:3]:
            array.setflags(write=False)  # as they are when received: one type for the compiler
        recorded, most = _record(
            rows,
            table.ids,
            table.logprobs,
            table.starts,
            drawn,
            kept,
            self._ids,
            self._logprobs,
            self._provenance,
            self.count,
            self._accepted,
            self.finite,
        )
        self.recorded += recorded
        self._most = max(self._most, most)  # some row that has no output now may have more
        return ended

    def _cut(self, rows: Index, table: StepTable, drawn: Index) -> tuple[Index, Index]:
        """Cut steps after the token that completes a stop string: `[R']` tokens kept, and ends."""
        wanted = (rows >= 0) & (table.starts >= 0)
        drawn = drawn * wanted
        of = np.repeat(np.arange(len(rows)), drawn)
        place = np.arange(len(of)) - (np.cumsum(drawn) - drawn)[of]
        tokens = table.ids[table.starts[of] + place, 0].astype(np.int64)
        kept, stopped = drawn.astype(np.int32), np.zeros(len(rows), np.bool_)
        states = self._state[rows]
        rules = [self._rules.get(row) for row in rows.tolist()]
        for rule in {id(rule): rule for rule in rules if rule is not None}.values():
            mine = np.array([other is rule for other in rules])
            cut_rows(rule.table, rule.classes, mine, states, of, place, tokens, kept, stopped)
        self._state[rows[wanted]] = states[wanted]
        return kept.astype(np.int64), np.flatnonzero(stopped)

    def correct_last(self, row: int, accepted: int) -> None:
        """The response has ended: settle whether its last token was an accepted draft.

        Args:
            row: of the request.
            accepted: its accepted drafts in all steps, as vLLM counts them.
        """
        if accepted > self._accepted[row] and self.count[row]:
            self._provenance[row, self.count[row] - 1] = _DRAFTED

    def take(self, row: int, top_k: int) -> Tokens:
        """What is to be reported, with the first K entries of the list at each place."""
        n = int(self.count[row])
        self.count[row] = 0
        self.begun[row] = True
        have = slice(1, 1 + top_k)
        ids, logprobs = self._ids[row, :n], self._logprobs[row, :n]
        return Tokens(
            ids[:, 0].copy(),
            logprobs[:, 0].copy(),
            ids[:, have].copy(),
            logprobs[:, have].copy(),
            self._provenance[row, :n].copy(),
        )

    def _make_room(self, tokens: int, width: int) -> None:
        """Make sure that every row has room for so many more tokens of a table of this width."""
        have, wide = self._ids.shape[1:]
        if self._most + tokens > have:
            self._most = int(self.count.max(initial=0))
        needed = self._most + tokens
        if needed > have or width > wide:
            grown = have if needed <= have else max(2 * have, needed)
            self._resize(len(self.count), grown, max(wide, width))

    def _resize(self, rows: int, tokens: int, width: int) -> None:
        """Make the arrays larger: `[rows, tokens, width]`. What they hold stays."""
        for name in (
            "_ids",
            "_logprobs",
            "_provenance",
            "_accepted",
            "_state",
            "count",
            "begun",
            "finite",
        ):
            array = getattr(self, name)
            larger = np.zeros((rows, tokens, width)[: array.ndim], array.dtype)
            larger[tuple(map(slice, array.shape))] = array
            setattr(self, name, larger)


@kernel
def _record(
    rows: Index,
    ids: IntArray,
    logprobs: FloatArray,
    starts: Index,
    drawn: Index,
    kept: Index,
    to_ids: IntArray,
    to_logprobs: FloatArray,
    provenance: ByteArray,
    count: Index,
    accepted: Index,
    finite: Flags,
) -> tuple[int, int]:
    """Append `kept[i]` of the `drawn[i]` tokens from row `starts[i]` of a table to `rows[i]`.

    Returns:
        How many tokens that were, and the most that one of these rows has now.
    """
    width = ids.shape[1]
    total = most = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0 or starts[i] < 0 or kept[i] == 0:
            continue
        at = count[row]
        for j in range(kept[i]):
            source = starts[i] + j
            for k in range(width):
                to_logprobs[row, at + j, k] = logprobs[source, k]
                to_ids[row, at + j, k] = ids[source, k]
            finite[row] &= np.isfinite(logprobs[source, 0])
            provenance[row, at + j] = _DRAFTED if j < drawn[i] - 1 else _SAMPLED
        accepted[row] += min(kept[i], drawn[i] - 1)
        count[row] = at + kept[i]
        total += kept[i]
        most = max(most, count[row])
    return total, most


def warm_up() -> None:
    """Compile `Unreported.record`, or load it compiled."""
    table = StepTable(
        np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32), np.zeros(1, np.int64), None
    )
    unreported = Unreported()
    unreported.record(np.array([unreported.open()]), table)
