"""Proposes drafts for each row of a step: its earlier continuation, or the cache's drafts.

While a response follows the text that once continued it, the rest of the text is the draft. A token
that differs is first taken for a substitution. If the next one differs too, the text is searched
around the cursor for the last few generated tokens; if they are found, drafting resumes, but never
with a token that was already rejected there. A response is identified by its slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache
from asyncrl.engine.sampling.verification import offsets_of, ranges_of
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

_ANCHOR = 3
"""Tokens that must agree before a text is followed again."""
_REACH = 8
_AGREEMENT = 0.95
"""Estimated probability that a followed text's next token is generated again."""
_BACK = np.arange(-_ANCHOR, 0)
_SHIFTS = np.array(sorted(range(-_REACH, _REACH + 1), key=abs))


def path_probabilities(length: int) -> FloatArray:
    """Return `[length]` estimated probabilities that a text is accepted up to each token."""
    return np.power(np.float32(_AGREEMENT), np.arange(1, length + 1, dtype=np.float32))


class Continuations:
    """Earlier texts of many responses, each with a cursor. Work is batched over slots."""

    def __init__(self) -> None:
        self._text: IntArray = np.zeros((0, 0), np.int32)
        self._length = np.zeros(0, np.int64)
        self._cursor = np.zeros(0, np.int64)
        self._following = np.zeros(0, np.bool_)
        self._rejected = np.zeros(0, np.int64)
        """Place in each slot's text of the last token that was rejected; -1: none."""
        self._active = 0

    def __len__(self) -> int:
        return self._active

    def begin(self, slot: int, tokens: IntArray) -> None:
        """Start a response in `slot`, which must be free, with `tokens` as its earlier text."""
        if len(tokens):
            self._make_room(slot + 1, len(tokens))
            self._text[slot, : len(tokens)] = tokens
            self._length[slot] = len(tokens)
            self._cursor[slot] = 0
            self._rejected[slot] = -1
            self._following[slot] = True
            self._active += 1

    def end(self, slot: int) -> None:
        """Free the slot of a response. Idempotent."""
        if slot < len(self._length) and self._length[slot]:
            self._length[slot] = 0
            self._following[slot] = False
            self._active -= 1

    def move(self, source: int, target: int) -> None:
        """Move a response to the slot `target`, overwriting what was there."""
        self.end(target)
        if source < len(self._length) and self._length[source]:
            self._make_room(target + 1, 0)
            for column in (self._text, self._length, self._cursor, self._following, self._rejected):
                column[target] = column[source]
            self._length[source] = 0
            self._following[source] = False

    def follow_from(self, slots: Index, cursors: Index) -> None:
        """Follow texts `slots` `[n]` from `cursors` `[n]`; the token before each was rejected."""
        self._cursor[slots] = cursors
        self._rejected[slots] = np.asarray(cursors) - 1
        self._following[slots] = True

    def follow(
        self, slots: Index, grown: Index, table: IntArray, rows: Index, ends: Index, starts: Index
    ) -> None:
        """Move cursors past the `grown` new tokens of responses, all `[n]`.

        Response i is table[rows[i], starts[i] : ends[i]], the new tokens last.
        """
        if not self._active:
            return
        mine = np.flatnonzero(slots < len(self._length))
        mine = mine[self._length[slots[mine]] > 0]
        if not len(mine):
            return
        slots, grown, rows, ends = slots[mine], grown[mine], rows[mine], ends[mine]
        cursor = self._cursor[slots]
        columns = np.arange(max(int(grown.max()), 1))  # one also if none has grown
        generated = _take(table, rows, (ends - grown)[:, None] + columns)
        expected = _take(self._text, slots, cursor[:, None] + columns)
        differs = (generated != expected) & (columns < grown[:, None])
        agrees = ~differs.any(axis=1)
        place = cursor + differs.argmax(axis=1)
        rejects = self._following[slots] & ~agrees & (place < self._length[slots])
        # Tokens after the first one that differs were not drafted from the text.
        alone = (place == cursor + grown - 1) & (place > self._rejected[slots] + 1)
        self._rejected[slots[rejects]] = place[rejects]
        self._cursor[slots] = cursor + grown
        self._following[slots] &= (agrees | alone) & (cursor + grown <= self._length[slots])
        lost = np.flatnonzero(~self._following[slots])
        if len(lost):
            tail = _take(table, rows[lost], ends[lost, None] + _BACK)
            enough = ends[lost] - starts[mine[lost]] >= _ANCHOR
            self._find_again(slots[lost], tail, enough)

    def left(self, slots: Index) -> NDArray[np.int64]:
        """Return `[n]` tokens that each slot's text can still propose; 0 if it is not followed."""
        left = np.zeros(len(slots), np.int64)
        if self._active:
            known = np.flatnonzero((slots >= 0) & (slots < len(self._length)))
            mine = slots[known]
            ahead = np.maximum(self._length[mine] - self._cursor[mine], 0)
            left[known] = np.where(self._following[mine], ahead, 0)
        return left

    def propose(self, slots: Index, width: int) -> IntArray:
        """Return `[n, width]` next tokens of each text; those beyond `left` are meaningless."""
        return _take(self._text, slots, self._cursor[slots][:, None] + np.arange(width))

    def _find_again(self, slots: Index, tail: IntArray, enough: NDArray[np.bool_]) -> None:
        """Search each text for its response's last tokens, nearest to the cursor first."""
        ends = self._cursor[slots][:, None] + _SHIFTS
        places = ends[:, :, None] + _BACK
        candidates = _take(self._text, slots, places.reshape(len(slots), -1)).reshape(places.shape)
        fits = (places[:, :, 0] >= 0) & (ends < self._length[slots, None]) & enough[:, None]
        fits &= ends > self._rejected[slots, None]
        hit = (candidates == tail[:, None]).all(axis=2) & fits
        found = hit.any(axis=1)
        self._following[slots[found]] = True
        self._cursor[slots[found]] = ends[found, hit[found].argmax(axis=1)]
        # A cursor that is further past the end than the search reaches can find nothing more.
        for slot in slots[~found & (self._cursor[slots] - _REACH > self._length[slots])].tolist():
            self.end(slot)

    def _make_room(self, slots: int, width: int) -> None:
        have, wide = self._text.shape
        if slots > have or width > wide:
            rows = have if slots <= have else max(slots, 2 * have)
            columns = wide if width <= wide else max(width, 2 * wide)
            bigger = np.zeros((rows, columns), np.int32)
            bigger[:have, :wide] = self._text
            self._text = bigger
            more = len(bigger) - have
            self._length = np.concatenate([self._length, np.zeros(more, np.int64)])
            self._cursor = np.concatenate([self._cursor, np.zeros(more, np.int64)])
            self._following = np.concatenate([self._following, np.zeros(more, np.bool_)])
            self._rejected = np.concatenate([self._rejected, np.full(more, -1, np.int64)])


def _take(table: IntArray, rows: Index, columns: Index) -> IntArray:
    return np.asarray(table[rows[:, None], np.clip(columns, 0, table.shape[1] - 1)])


NO_HANDLE = -1
"""Handle of a response that neither drafts from the source nor feeds it."""


kernel = kernels_of("engine")

Index = NDArray[np.integer[Any]]


class Proposer:
    """Proposes drafts for the rows of a step, trees if `branching`, else chains.

    Rows that follow no earlier continuation draft from `source` (None: nothing).
    """

    def __init__(
        self, source: RolloutCache | None, continuations: Continuations, *, branching: bool
    ) -> None:
        self._source = source
        self._continuations = continuations
        self._branching = branching

    def propose(
        self,
        slots: Index,
        handles: Index,
        budgets: IntArray,
        max_depths: IntArray,
        *,
        stops: NDArray[np.integer[Any]],
        min_probability: float,
    ) -> Drafts:
        """Propose drafts for n rows: `budgets[i]` tokens in paths of `max_depths[i]` at most.

        `slots` are in the continuations (-1: none), `handles` in the source (`NO_HANDLE`: none).
        Nothing is proposed after the tokens `stops` `[n, W]`, padded with -1, where the cache's
        text continues if the response of another row had several turns. Only continuations are cut
        to `max_depths`.
        """
        estimates = path_probabilities(int(budgets.max(initial=0)))
        lengths = np.minimum(np.minimum(self._continuations.left(slots), budgets), max_depths)
        lengths = lengths.clip(0, int((estimates >= min_probability).sum()))
        following = np.flatnonzero(lengths)
        asked = np.flatnonzero((lengths == 0) & (budgets > 0) & (handles != NO_HANDLE))
        found: Drafts | None = None
        if self._source is not None and len(asked):
            found = self._source.draft(
                handles[asked].astype(np.int32),
                budgets[asked].astype(np.int32),
                branching=self._branching,
                min_probability=min_probability,
            )
            if len(asked) == len(slots):
                return _up_to_stops(found, stops)
            lengths[asked] = np.diff(found.offsets)
        offsets = offsets_of(lengths)
        tokens, parents = (np.empty(offsets[-1], np.int32) for _ in range(2))
        paths = np.empty(offsets[-1], np.float32)
        if found is not None:
            at = ranges_of(offsets[asked], lengths[asked])
            tokens[at], parents[at] = found.tokens, found.parents
            paths[at] = found.path_probabilities
        if len(following):
            width = int(lengths[following].max())
            inside = np.arange(width) < lengths[following, None]
            at, step = ranges_of(offsets[following], lengths[following]), np.nonzero(inside)[1]
            tokens[at] = self._continuations.propose(slots[following], width)[inside]
            parents[at] = step - 1
            paths[at] = estimates[step]
        return _up_to_stops(Drafts(tokens, parents, offsets, paths), stops)


def _up_to_stops(drafts: Drafts, stops: NDArray[np.integer[Any]]) -> Drafts:
    if not len(drafts.tokens):
        return drafts
    tokens, parents = np.empty_like(drafts.tokens), np.empty_like(drafts.parents)
    offsets, paths = np.empty_like(drafts.offsets), np.empty_like(drafts.path_probabilities)
    total = _before_stops(
        drafts.tokens, drafts.parents, drafts.offsets, drafts.path_probabilities,
        stops.astype(np.int64, copy=False), tokens, parents, offsets, paths,
    )  # fmt: skip
    if total == len(drafts.tokens):
        return drafts
    return Drafts(tokens[:total], parents[:total], offsets, paths[:total])


@kernel
def _before_stops(
    tokens: IntArray,
    parents: IntArray,
    offsets: IntArray,
    paths: FloatArray,
    stops: NDArray[np.int64],
    out_tokens: IntArray,
    out_parents: IntArray,
    out_offsets: IntArray,
    out_paths: FloatArray,
) -> int:
    """Copy the nodes without a stop token above them; return their number."""
    total = 0
    out_offsets[0] = 0
    place = np.empty(len(tokens), np.int32)  # place of each node in its row's part of the output
    for row in range(len(offsets) - 1):
        first, begin = offsets[row], total
        for node in range(first, offsets[row + 1]):
            parent = parents[node]
            place[node] = -1
            if parent >= 0:
                above = first + parent
                if place[above] < 0 or (stops[row] == tokens[above]).any():
                    continue
                parent = place[above]
            place[node] = total - begin
            out_tokens[total], out_parents[total] = tokens[node], parent
            out_paths[total] = paths[node]
            total += 1
        out_offsets[row + 1] = total
    return total


def warm_up() -> None:
    """Compile what `Proposer.propose` calls, or load the compiled code."""
    one, chance = np.zeros(1, np.int32), np.ones(1, np.float32)
    _up_to_stops(
        Drafts(one, one - 1, np.arange(2, dtype=np.int32), chance), np.zeros((1, 1), np.int64)
    )
