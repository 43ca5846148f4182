"""Chooses which of a step's draws each row appends: pure bookkeeping over flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.sampling.stopping import cut_rows
from asyncrl.engine.torch.rows import Rows
from asyncrl.engine.torch.step_kernels import choose_draws
from asyncrl.engine.torch.step_sampling import Draws
from asyncrl.rollout.acceptance import AcceptedPaths
from asyncrl.rollout.trajectory import IntArray

_NO_WALK = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Paths:
    """The draws that rows append in a step: M in all."""

    chosen: NDArray[np.int64]
    """`[M]` indices of draws, row after row."""
    row: NDArray[np.int64]
    """`[M]` of each."""
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
    n = rows.n
    accepted: IntArray = draws.accepted
    walked, walk = 0, _NO_WALK
    if walks is not None:
        walked, walk = len(walks.accepted), walks.draws
        accepted = np.concatenate([walks.accepted, accepted[walked:]])
    most = n + int(accepted.sum())
    chosen, row, step = (np.empty(most, np.int64) for _ in range(3))
    kept, stopped = np.empty(n, np.int32), np.empty(n, np.bool_)
    size = choose_draws(
        accepted, draws.starts, walked, walk, draws.tokens, rows.stops, draws.begun, rows.left(),
        chosen, row, step, kept, stopped,
    )  # fmt: skip
    chosen, row, step = chosen[:size], row[:size], step[:size]
    if rows.with_stop_rule:
        _follow_strings(rows, draws, row, step, draws.tokens[chosen], kept, stopped)
        if int(kept.sum()) < size:
            inside = step < kept[row]
            chosen, row, step = chosen[inside], row[inside], step[inside]
    return Paths(chosen, row, step, kept, accepted, stopped)


def _follow_strings(
    rows: Rows,
    draws: Draws,
    row: NDArray[np.int64],
    step: NDArray[np.int64],
    tokens: NDArray[np.int64],
    kept: IntArray,
    stopped: NDArray[np.bool_],
) -> None:
    """Advance the rows' stop rules over their new tokens; cut `kept` where one is completed."""
    of_row = [request.sampling.stop_rule for request in rows.requests]
    renewed = np.flatnonzero(draws.begun)
    if len(renewed):
        for one in renewed.tolist():
            rule = of_row[one]
            rows.stop_state[one] = rule.start if rule is not None else 0
        this_turn = step >= draws.begun[row]
        row, step, tokens = row[this_turn], step[this_turn], tokens[this_turn]
    for rule in {id(rule): rule for rule in of_row if rule is not None}.values():
        mine = np.array([other is rule for other in of_row])
        cut_rows(rule.table, rule.classes, mine, rows.stop_state, row, step, tokens, kept, stopped)


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
    row = paths.row
    place = paths.chosen - draws.starts[row]
    apart = (row < decoding) & (place != paths.step)
    return row[apart], place[apart], paths.step[apart]
