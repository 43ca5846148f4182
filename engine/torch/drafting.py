"""What to propose for each row of a step. Wrong proposals cost time, never exactness.

A row that came with an old continuation drafts from it while the response follows it. After a
divergence the old text is searched around the cursor for the last few tokens that were written;
found, drafting goes on from there, and until then the row drafts from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache.trajectory import IntArray
from engine.torch.rows import NO_ROW, Rows

_ANCHOR = 3
"""Tokens that must agree before an old continuation is trusted again."""
_WINDOW = 8
"""How far from the cursor they are looked for."""


class Drafts(Protocol):
    """Proposals of the cache, ragged: row i has `tokens[offsets[i]:offsets[i + 1]]`."""

    @property
    def tokens(self) -> IntArray:
        """`[offsets[-1]]`"""

    @property
    def offsets(self) -> IntArray:
        """`[n + 1]`"""


class DraftSource(Protocol):
    """The part of `cache.tree.RolloutCache` that an engine uses."""

    def open(self, key: str, context: IntArray) -> int:
        """Begin a response to `context`; gives its row."""

    def close(self, row: int) -> None:
        """End a response."""

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Append each row's new tokens, ragged as in `Drafts`."""

    def draft(self, rows: IntArray, budgets: IntArray) -> Drafts:
        """Propose up to `budgets[i]` tokens for each row."""


def propose(
    rows: Rows, n: int, budgets: IntArray, source: DraftSource | None
) -> tuple[IntArray, IntArray]:
    """Drafts of rows `[0, n)`: a matrix `[n, D]` padded with -1, and counts `[n]`."""
    counts = np.zeros(n, np.int32)
    width = int(budgets.max(initial=0))
    drafts = np.full((n, width), -1, np.int32)
    if width == 0:
        return drafts, counts
    at = rows.old_at[:n]
    old = np.where(rows.in_step[:n], np.minimum(budgets, rows.old_length[:n] - at), 0)
    if old.any():
        columns = np.arange(width)
        index = np.minimum(at[:, None] + columns, rows.old.shape[1] - 1)
        proposed = np.take_along_axis(rows.old[:n], index, axis=1)
        drafts = np.where(columns < old[:, None], proposed, drafts)
        counts = old.astype(np.int32)
    if source is not None:
        ask = np.flatnonzero((counts == 0) & (budgets > 0) & (rows.cache_row[:n] != NO_ROW))
        if len(ask):
            found = source.draft(rows.cache_row[ask].astype(np.int32), budgets[ask])
            lengths = np.diff(found.offsets).astype(np.int32)
            counts[ask] = lengths
            drafts[np.repeat(ask, lengths), _ragged_columns(lengths)] = found.tokens
    return drafts, counts


def follow(rows: Rows, n: int, kept: IntArray) -> None:
    """Move the cursors of old continuations past the tokens just written (`kept[i]` of row i)."""
    active = np.flatnonzero(rows.old_length[:n] > 0)
    if not len(active):
        return
    total, at, grown = rows.total[active], rows.old_at[active], kept[active]
    columns = np.arange(int(grown.max(initial=0)))
    written = _take(rows.tokens, active, total[:, None] - grown[:, None] + columns)
    expected = _take(rows.old, active, at[:, None] + columns)
    agrees = ((written == expected) | (columns >= grown[:, None])).all(axis=1)
    inside = at + grown <= rows.old_length[active]
    rows.old_at[active] = at + grown
    rows.in_step[active] &= agrees & inside
    lost = active[~rows.in_step[active]]
    if len(lost):
        _find_again(rows, lost)


def _find_again(rows: Rows, lost: NDArray[np.int64]) -> None:
    """Look for each row's last tokens in its old continuation, nearest to the cursor first."""
    shifts = np.array(sorted(range(-_WINDOW, _WINDOW + 1), key=abs))
    back = np.arange(-_ANCHOR, 0)
    total, at = rows.total[lost], rows.old_at[lost]
    tail = _take(rows.tokens, lost, total[:, None] + back)
    ends = at[:, None] + shifts
    places = ends[:, :, None] + back
    windows = _take(rows.old, lost, places.reshape(len(lost), -1)).reshape(places.shape)
    fits = (places[:, :, 0] >= 0) & (ends < rows.old_length[lost, None])
    fits &= (total - rows.prompt[lost] >= _ANCHOR)[:, None]
    hit = (windows == tail[:, None]).all(axis=2) & fits
    found = hit.any(axis=1)
    rows.in_step[lost[found]] = True
    rows.old_at[lost[found]] = ends[found, hit[found].argmax(axis=1)]
    # Past the end of the old text plus the window nothing can be found any more.
    gone = ~found & (at - _WINDOW > rows.old_length[lost])
    rows.old_length[lost[gone]] = 0


def _take(table: IntArray, rows: NDArray[np.int64], columns: NDArray[np.integer]) -> IntArray:
    taken: IntArray = table[rows[:, None], np.clip(columns, 0, table.shape[1] - 1)]
    return taken


def _ragged_columns(lengths: IntArray) -> NDArray[np.int64]:
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def ragged(matrix: IntArray, lengths: IntArray | Sequence[int]) -> tuple[IntArray, IntArray]:
    """The first `lengths[i]` tokens of each row as flat tokens and offsets `[n + 1]`."""
    counts = np.asarray(lengths)
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return matrix[np.arange(matrix.shape[1]) < counts[:, None]], offsets
