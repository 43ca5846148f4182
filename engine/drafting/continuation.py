"""Earlier continuations of responses, which are drafted from first.

While a response follows the text that once continued it, the rest of the text is the draft. A token
that differs is first taken for a substitution. If the next one differs too, the text is searched
around the cursor for the last few generated tokens; if they are found, drafting resumes, but never
with a token that was already rejected there.

A response is identified by its slot, a small number that the caller chooses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import FloatArray, IntArray

Index = NDArray[np.integer[Any]]

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
        mine = np.flatnonzero(self._lengths(slots) > 0)
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

    def _lengths(self, slots: Index) -> NDArray[np.int64]:
        inside = np.minimum(slots, len(self._length) - 1)
        return np.where(slots < len(self._length), self._length[inside], 0)

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
    taken: IntArray = table[rows[:, None], np.clip(columns, 0, table.shape[1] - 1)]
    return taken
