"""The distribution that tokens are drawn from, and the random numbers that draw them.

A draw (`engine.sampling.drawing`) is a pure function of the distribution, the seed of the request,
the position in the response and, for tokens outside the list, the policy version. Its numbers are
the position-th outputs of SplitMix64 streams (Steele, Lea, Flood 2014) started at mixed seeds. So
neither the batch, nor the slot, nor the drafts can change which token a request generates, except
by rounding of logits (never with a model of `asyncrl.engine.torch.cpu.invariant_attention`).

A request that continues after a *rejected* token needs a new seed: given the rejection, the old
number at that position is no longer uniform. For the same reason the numbers that accept or reject
kept tokens, and those of tail draws, come from separate streams (`forked`), which differ between
policy versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.protocol import SamplingParams
from asyncrl.rollout.sampled_set import left_out
from asyncrl.rollout.trajectory import FloatArray, SeedArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 50
"""Random bits of a uniform number: few enough that `u * total` rounds to less than `total`."""


class Purpose(IntEnum):
    """Purposes of random streams other than ordinary draws."""

    ACCEPT = 0xA0761D6478BD642F
    """Acceptance of a kept token."""
    RESIDUAL = 0xE7037ED1A0B428DB
    """The draw in the place of a rejected token."""
    TAIL = 0x8EBC6AF09C88C6E3
    """The noise that names tokens outside the list of the most probable ones."""


def forked(seeds: SeedArray, purpose: Purpose, policy_version: int) -> SeedArray:
    """Return `[N]` seeds of streams that are independent of the ordinary draws of `seeds`."""
    step = np.uint64(policy_version * int(_GAMMA) & 0xFFFFFFFFFFFFFFFF)
    return _mix(_mix(seeds ^ np.uint64(purpose)) + step)


def uniforms(seeds: SeedArray, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[N]` numbers in (0, 1), one for each seed and response position."""
    bits = stream_bits(seeds, positions) >> np.uint64(64 - _BITS)
    return (bits.astype(np.float64) + 0.5) * 2.0**-_BITS


def stream_bits(seeds: SeedArray, positions: NDArray[np.int64]) -> SeedArray:
    """Return `[N]` 64 random bits, one number for each seed and response position."""
    return _mix(_mix(seeds + _GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def _mix(z: NDArray[np.uint64]) -> SeedArray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of N rows: a column for each."""

    temperature: FloatArray
    """`[N]` greater than 0."""
    top_k: NDArray[np.int64]
    """`[N]`; 0: off."""
    top_p: FloatArray
    """`[N]` in (0, 1]; 1: off."""
    min_p: FloatArray
    """`[N]` in [0, 1]; 0: off."""
    truncated: NDArray[np.bool_]
    """`[N]` True if any of the last three is on."""

    @classmethod
    def unset(cls, rows: int) -> Self:
        """Return columns that leave every distribution as it is."""
        one = np.ones(rows, np.float32)
        return cls(one, np.zeros(rows, np.int64), one.copy(), one * 0, np.zeros(rows, np.bool_))

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Self:
        """Return the columns of some requests."""
        columns = cls.unset(len(params))
        for row, one in enumerate(params):
            columns.set(row, one)
        return columns

    def set(self, row: int, params: SamplingParams) -> None:
        """Set one row."""
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.truncated[row] = params.truncation.is_active

    def at(self, rows: NDArray[np.integer]) -> SamplingColumns:
        """Return some rows, which may repeat."""
        truncated = self.truncated[rows]
        if not truncated.any():  # the usual case: the three columns between are not read
            return SamplingColumns(
                self.temperature[rows], self.top_k, self.top_p, self.min_p, truncated
            )
        return SamplingColumns(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], truncated
        )

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for column in (self.temperature, self.top_k, self.top_p, self.min_p, self.truncated):
            column[target] = column[source]


def processed_logprobs(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Return `[N, V]` float32 log-probabilities after temperature and truncation; -inf outside.

    `logits` `[N, V]` are float32 and may be overwritten. See `asyncrl.rollout.truncation`.
    """
    if bool((columns.temperature != 1).any()):
        logits = logits.div_(torch.from_numpy(columns.temperature).to(logits.device)[:, None])
    logprobs = torch.log_softmax(logits, dim=-1)
    cut = np.flatnonzero(columns.truncated)
    if not len(cut) or not len(logprobs):
        return logprobs
    if len(cut) == len(logprobs):
        return _truncated(logprobs, columns)
    rows = torch.from_numpy(cut).to(logits.device)
    logprobs[rows] = _truncated(logprobs[rows], columns.at(cut))
    return logprobs


def _truncated(logprobs: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    top_k, top_p, min_p = (
        torch.from_numpy(column).to(logprobs.device)
        for column in (columns.top_k, columns.top_p, columns.min_p)
    )
    kept = logprobs.masked_fill_(left_out(logprobs, top_k, top_p, min_p), float("-inf"))
    return kept.sub_(torch.logsumexp(kept, dim=-1, keepdim=True))
