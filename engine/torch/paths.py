"""From a step's draws to what each row writes: pure bookkeeping over flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.torch.rows import Rows
from rollout.acceptance import AcceptedPaths
from rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class Draws:
    """All draws of a step, flat: N of them, row by row, one for each position with logits."""

    row: NDArray[np.int64]
    """`[N]`"""
    offset: NDArray[np.int64]
    """`[N]` place in the response, counted from the row's first draw. Nodes of equal depth share
    it, and with it the random number: at most one of them is used."""
    starts: NDArray[np.int64]
    """`[n]` each row's first draw."""
    logprobs: torch.Tensor
    """`[N, V]` the processed distribution of each draw."""
    tokens: NDArray[np.int64]
    """`[N]`; of a judged row its accepted tokens and the one behind them, then -1."""
    judged: NDArray[np.int64]
    """Rows whose kept tokens were judged."""
    accepted: IntArray
    """`[n]` kept tokens that stay; 0 for all other rows."""


@dataclass(frozen=True, slots=True)
class Paths:
    """What each row writes in a step: M draws in all."""

    chosen: NDArray[np.int64]
    """`[M]` indices of draws, row after row."""
    step: NDArray[np.int64]
    """`[M]` place of each in what its row writes, from 0."""
    kept: IntArray
    """`[n]` tokens that each row writes."""
    accepted: IntArray
    """`[n]` of those, at most, given beforehand: drafted or kept; the next one is a free draw."""
    stopped: NDArray[np.bool_]
    """`[n]` whether the last one is a stop token."""


def choose(rows: Rows, draws: Draws, walks: AcceptedPaths | None) -> Paths:
    """Each row's path, cut behind its first stop token and at its limit.

    Args:
        rows: as before this step.
        draws: of this step.
        walks: of the decoding rows, which come first; None: nothing was drafted.
    """
    if walks is None and not len(draws.judged):
        return _one_each(rows, draws)
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
    if (kept < counts).any():
        written = step < kept[row]
        chosen, step = chosen[written], step[written]
    return Paths(chosen, step, kept, accepted, first_stop < kept)


def _one_each(rows: Rows, draws: Draws) -> Paths:
    """A step without drafts and kept tokens, in a few operations: one draw for each row."""
    stopped = (draws.tokens[:, None] == rows.stops[: rows.n]).any(axis=1)
    zeros = np.zeros(rows.n, np.int64)
    return Paths(draws.starts, zeros, np.ones(rows.n, np.int32), draws.accepted, stopped)
