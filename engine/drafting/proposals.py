"""Proposes drafts for each row of a step: its earlier continuation, or the cache's drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache
from asyncrl.engine.drafting.continuation import Continuations, path_probabilities
from asyncrl.engine.sampling.verification import offsets_of
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

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
            at = _places(offsets, asked)
            tokens[at], parents[at] = found.tokens, found.parents
            paths[at] = found.path_probabilities
        if len(following):
            width = int(lengths[following].max())
            inside = np.arange(width) < lengths[following, None]
            at, step = _places(offsets, following), np.nonzero(inside)[1]
            tokens[at] = self._continuations.propose(slots[following], width)[inside]
            parents[at] = step - 1
            paths[at] = estimates[step]
        drafts = Drafts(tokens, parents, offsets, paths)
        return _up_to_stops(drafts, stops)


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


def _places(offsets: IntArray, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = offsets[rows + 1] - offsets[rows]
    starts = np.cumsum(lengths) - lengths
    shifts = np.repeat(offsets[rows] - starts, lengths)
    return np.asarray(np.arange(len(shifts)) + shifts)
