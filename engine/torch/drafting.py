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

from engine.drafting.planner import DraftPlanner
from engine.torch.rows import NO_ROW, Rows
from engine.torch.trees import Proposal, TokenTrees, no_trees, plant
from rollout.trajectory import FloatArray, IntArray

_ANCHOR = 3
"""Tokens that must agree before an old continuation is trusted again."""
_WINDOW = 8
"""How far from the cursor they are looked for."""


class Drafts(Protocol):
    """Proposals of the cache, ragged: row i has the nodes offsets[i] .. offsets[i + 1] - 1."""

    @property
    def tokens(self) -> IntArray:
        """`[N]`"""

    @property
    def parents(self) -> IntArray:
        """`[N]` the node before it, counted within its row; -1: the row's last token."""

    @property
    def offsets(self) -> IntArray:
        """`[n + 1]`"""

    @property
    def path_probabilities(self) -> FloatArray:
        """`[N]` estimated probability that the node and its ancestors are accepted."""


class DraftSource(Protocol):
    """The part of `cache.tree.RolloutCache` that an engine uses."""

    def open(self, key: str, context: IntArray) -> int:
        """Begin a response to `context`; gives its row."""

    def close(self, row: int) -> None:
        """End a response."""

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """Append each row's new tokens, ragged as in `Drafts`."""

    def advance(self, policy_version: int) -> None:
        """From now on this version writes; what others wrote counts less."""

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        """Propose up to `budgets[i]` tokens for each row: chains, or trees with `branching`."""


def draft(
    rows: Rows,
    n: int,
    planner: DraftPlanner,
    source: DraftSource | None,
    *,
    branching: bool,
    other_tokens: int,
    vocab_size: int,
) -> TokenTrees:
    """What rows `[0, n)` feed beside their last token, as much as the planner finds worth it.

    A path is no longer than what its row may write before the draw behind it. A tree may hold more
    nodes than that, as many as its row's slot has places left.
    """
    left = rows.left()[:n]
    room = left - 1
    if branching:
        room = np.where(left > 1, rows.tokens.shape[1] - rows.total[:n], 0).astype(np.int32)
    budgets, least = planner.ask(room + 1, other_tokens=other_tokens)
    if not budgets.any():
        return no_trees(n)
    proposal = propose(
        rows, np.minimum(budgets, room), source, planner, branching=branching, least=least
    )
    if not len(proposal.tokens):
        return no_trees(n)
    keep = planner.choose(
        proposal.path_probabilities, proposal.offsets, rows=n, other_tokens=other_tokens
    )
    return plant(proposal, np.minimum(keep, room), left - 1, vocab_size)


def propose(
    rows: Rows,
    budgets: IntArray,
    source: DraftSource | None,
    planner: DraftPlanner,
    *,
    branching: bool,
    least: float,
) -> Proposal:
    """Drafts of the first rows, `budgets[i]` tokens at most for each."""
    n = len(budgets)
    expected = planner.continuation(int(budgets.max(initial=0)))
    lengths = np.where(
        rows.in_step[:n], np.minimum(budgets, rows.old_length[:n] - rows.old_at[:n]), 0
    )
    lengths = np.minimum(lengths, rows.left()[:n] - 1).clip(0, int((expected >= least).sum()))
    ask = np.flatnonzero((lengths == 0) & (budgets > 0) & (rows.cache_row[:n] != NO_ROW))
    found: Drafts | None = None
    if source is not None and len(ask):
        found = source.draft(
            rows.cache_row[ask].astype(np.int32),
            budgets[ask].astype(np.int32),
            branching=branching,
            min_probability=least,
        )
        if len(ask) == n:
            return Proposal(found.tokens, found.parents, found.offsets, found.path_probabilities)
    old = np.flatnonzero(lengths)
    if found is not None:
        lengths[ask] = np.diff(found.offsets)
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    tokens, parents = (np.empty(offsets[-1], np.int32) for _ in range(2))
    probabilities = np.empty(offsets[-1], np.float32)
    if found is not None:
        at = _places(offsets, ask)
        tokens[at], parents[at] = found.tokens, found.parents
        probabilities[at] = found.path_probabilities
    at, step = _places(offsets, old), _columns(lengths[old])
    row = np.repeat(old, lengths[old])
    tokens[at] = rows.old[row, rows.old_at[row] + step]
    parents[at] = step - 1
    probabilities[at] = expected[step]
    return Proposal(tokens, parents, offsets, probabilities)


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


def _columns(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """0 .. lengths[i] - 1, one row after the other."""
    starts = np.cumsum(lengths) - lengths
    out: NDArray[np.int64] = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return out


def _places(offsets: IntArray, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the values of some rows stand in a ragged array."""
    lengths = offsets[rows + 1] - offsets[rows]
    out: NDArray[np.int64] = np.repeat(offsets[rows], lengths) + _columns(lengths)
    return out


def ragged(matrix: IntArray, lengths: IntArray | Sequence[int]) -> tuple[IntArray, IntArray]:
    """The first `lengths[i]` tokens of each row as flat tokens and offsets `[n + 1]`."""
    counts = np.asarray(lengths)
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return matrix[np.arange(matrix.shape[1]) < counts[:, None]], offsets
