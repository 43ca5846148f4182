"""Old continuations that running responses are drafted from first. One for all engines.

A request may come with the text that its response once went on with. While the response follows
it, the rest is the draft. After a divergence the old text is searched around the cursor for the
last few tokens that were written; found, drafting goes on from there. A wrong draft costs time,
never exactness.

A response is known by a slot, a small number of the caller's choice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.trajectory import IntArray

Index = NDArray[np.integer]

_ANCHOR = 3
"""Tokens that must agree before an old text is trusted again."""
_WINDOW = 8
"""How far from the cursor they are looked for."""
_BACK = np.arange(-_ANCHOR, 0)
_SHIFTS = np.array(sorted(range(-_WINDOW, _WINDOW + 1), key=abs))


class Continuations:
    """The old texts of many responses and the cursors in them; work is batched over slots."""

    def __init__(self) -> None:
        self._text: IntArray = np.zeros((0, 0), np.int32)
        self._length = np.zeros(0, np.int64)
        self._at = np.zeros(0, np.int64)
        self._in_step = np.zeros(0, np.bool_)
        self._active = 0

    def __len__(self) -> int:
        return self._active

    def begin(self, slot: int, tokens: IntArray) -> None:
        """A response starts in `slot` (which must be free) whose old text is `tokens`."""
        if len(tokens):
            self._room(slot + 1, len(tokens))
            self._text[slot, : len(tokens)] = tokens
            self._length[slot] = len(tokens)
            self._at[slot] = 0
            self._in_step[slot] = True
            self._active += 1

    def end(self, slot: int) -> None:
        """A response has ended; the slot is free. Idempotent."""
        if slot < len(self._length) and self._length[slot]:
            self._length[slot] = 0
            self._in_step[slot] = False
            self._active -= 1

    def follow(
        self, slots: Index, grown: Index, table: IntArray, rows: Index, ends: Index, starts: Index
    ) -> None:
        """Responses were written on: move the cursors.

        Args:
            slots: `[n]`
            grown: `[n]` tokens that each response has just got.
            table: `[R, M]` tokens of all contexts.
            rows: `[n]` each response's row of the table.
            ends: `[n]` where it ends there now; the new tokens lie before.
            starts: `[n]` where it began.
        """
        mine = np.flatnonzero(self._lengths(slots) > 0)
        if not len(mine):
            return
        slots, grown, rows, ends = slots[mine], grown[mine], rows[mine], ends[mine]
        at = self._at[slots]
        columns = np.arange(int(grown.max(initial=0)))
        written = _take(table, rows, (ends - grown)[:, None] + columns)
        expected = _take(self._text, slots, at[:, None] + columns)
        agrees = ((written == expected) | (columns >= grown[:, None])).all(axis=1)
        self._at[slots] = at + grown
        self._in_step[slots] &= agrees & (at + grown <= self._length[slots])
        lost = np.flatnonzero(~self._in_step[slots])
        if len(lost):
            tail = _take(table, rows[lost], ends[lost, None] + _BACK)
            enough = ends[lost] - starts[mine[lost]] >= _ANCHOR
            self._find_again(slots[lost], tail, enough)

    def left(self, slots: Index) -> NDArray[np.int64]:
        """`[n]` tokens that each slot's old text can still propose; 0 where it is out of step."""
        out = np.zeros(len(slots), np.int64)
        if self._active:
            known = np.flatnonzero(np.asarray(slots) < len(self._length))
            mine = slots[known]
            out[known] = np.where(self._in_step[mine], self._length[mine] - self._at[mine], 0)
        return out

    def propose(self, slots: Index, width: int) -> IntArray:
        """`[n, width]` the next tokens of each old text; past `left` they mean nothing."""
        return _take(self._text, slots, self._at[slots][:, None] + np.arange(width))

    def _find_again(self, slots: Index, tail: IntArray, enough: NDArray[np.bool_]) -> None:
        """Look for each response's last tokens in its old text, nearest to the cursor first."""
        ends = self._at[slots][:, None] + _SHIFTS
        places = ends[:, :, None] + _BACK
        windows = _take(self._text, slots, places.reshape(len(slots), -1)).reshape(places.shape)
        fits = (places[:, :, 0] >= 0) & (ends < self._length[slots, None]) & enough[:, None]
        hit = (windows == tail[:, None]).all(axis=2) & fits
        found = hit.any(axis=1)
        self._in_step[slots[found]] = True
        self._at[slots[found]] = ends[found, hit[found].argmax(axis=1)]
        # Past the end of the old text plus the window nothing can be found any more.
        for slot in slots[~found & (self._at[slots] - _WINDOW > self._length[slots])].tolist():
            self.end(slot)

    def _lengths(self, slots: Index) -> NDArray[np.int64]:
        if not self._active:
            return np.zeros(len(slots), np.int64)
        inside = np.minimum(slots, len(self._length) - 1)
        return np.where(slots < len(self._length), self._length[inside], 0)

    def _room(self, slots: int, width: int) -> None:
        have, wide = self._text.shape
        if slots > have or width > wide:
            bigger = np.zeros((max(slots, 2 * have), max(width, wide)), np.int32)
            bigger[:have, :wide] = self._text
            self._text = bigger
            more = len(bigger) - have
            self._length = np.concatenate([self._length, np.zeros(more, np.int64)])
            self._at = np.concatenate([self._at, np.zeros(more, np.int64)])
            self._in_step = np.concatenate([self._in_step, np.zeros(more, np.bool_)])


def _take(table: IntArray, rows: Index, columns: Index) -> IntArray:
    taken: IntArray = table[rows[:, None], np.clip(columns, 0, table.shape[1] - 1)]
    return taken
