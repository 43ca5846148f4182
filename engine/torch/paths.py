"""Chooses which of a step's draws each row appends: pure bookkeeping over flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.stopping import cut_rows
from engine.torch.draws import Draws
from engine.torch.rows import Rows
from rollout.acceptance import AcceptedPaths
from rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class Paths:
    """The draws that rows append in a step: M in all."""

    chosen: NDArray[np.int64]
    """`[M]` indices of draws, row after row."""
    step: NDArray[np.int64]
    """`[M]` place of each among its row's new tokens, from 0."""
    kept: IntArray
    """`[n]` tokens that each row appends."""
    accepted: IntArray
    """`[n]` at most how many of those are accepted drafts or kept tokens; the next one is a free
    draw."""
    stopped: NDArray[np.bool_]
    """`[n]` whether the last one is a stop token or completes a stop string."""


def choose(rows: Rows, draws: Draws, walks: AcceptedPaths | None) -> Paths:
    """Choose each row's path, cut after its first stop token or string and at its limit.

    Args:
        rows: before this step's tokens are appended.
        draws: all draws of this step.
        walks: of the decoding rows, which come first; None: nothing was drafted.
    """
    if walks is None and not len(draws.judged):
        paths = _one_each(rows, draws)
        if rows.with_stop_rule:
            everyone = np.arange(rows.n)
            _follow_strings(rows, everyone, paths.step, draws.tokens, paths.kept, paths.stopped)
        return paths
    accepted = draws.accepted.copy()
    if walks is not None:
        accepted[: len(walks.accepted)] = walks.accepted
    counts = accepted + 1
    row = np.repeat(np.arange(rows.n), counts)
    step = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    chosen = draws.starts[row] + step
    if walks is not None:
        chosen[: len(walks.draws)] = walks.draws
    stops = (draws.tokens[chosen][:, None] == rows.stops[row]).any(axis=1)
    first_stop = np.full(rows.n, np.iinfo(np.int32).max - 1, np.int32)
    np.minimum.at(first_stop, row[stops], step[stops].astype(np.int32))
    kept = np.minimum(np.minimum(counts, first_stop + 1), rows.left()).astype(np.int32)
    stopped = first_stop < kept
    if rows.with_stop_rule:
        _follow_strings(rows, row, step, draws.tokens[chosen], kept, stopped)
    if (kept < counts).any():
        inside = step < kept[row]
        chosen, step = chosen[inside], step[inside]
    return Paths(chosen, step, kept, accepted, stopped)


def _follow_strings(
    rows: Rows,
    row: NDArray[np.int64],
    step: NDArray[np.int64],
    tokens: NDArray[np.int64],
    kept: IntArray,
    stopped: NDArray[np.bool_],
) -> None:
    """Advance the rows' stop rules over their new tokens; cut `kept` where one is completed."""
    of_row = [request.sampling.stop_rule for request in rows.requests]
    for rule in {id(rule): rule for rule in of_row if rule is not None}.values():
        mine = np.array([other is rule for other in of_row])
        cut_rows(rule.table, rule.classes, mine, rows.stop_state, row, step, tokens, kept, stopped)


def _one_each(rows: Rows, draws: Draws) -> Paths:
    """One draw for each row: a step without drafts and kept tokens, in a few operations."""
    stopped = (draws.tokens[:, None] == rows.stops[: rows.n]).any(axis=1)
    zeros = np.zeros(rows.n, np.int64)
    return Paths(draws.starts, zeros, np.ones(rows.n, np.int32), draws.accepted, stopped)


def moved_places(
    draws: Draws, paths: Paths, decoding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Accepted tree nodes whose KV does not lie where a chain would have put it.

    Args:
        draws: of a step with forked trees.
        paths: chosen among them.
        decoding: decoding rows.

    Returns:
        Row of each, and its place now and its place in the chain, both counted from the first
        token that the row was fed.
    """
    row = draws.row[paths.chosen]
    place = paths.chosen - draws.starts[row]
    apart = (row < decoding) & (place != paths.step)
    return row[apart], place[apart], paths.step[apart]
