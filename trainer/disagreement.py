"""How far the log-probabilities of an engine are from the trainer's, on tokens of one policy.

For a token x that an engine drew under exactly the trainer's version, d = trainer's minus engine's
log-probability is rounding if both have the same policy. Two numbers are judged:

    mean   of min(|d|, 1): rounding keeps it small whatever happens
    slope  of the regression of d on g = log p(x) + H(p), without intercept

g is the derivative of log p(x) with respect to the logarithm of the inverse temperature. So an
engine that samples at temperature T * exp(slope) in place of T has d = slope * g to first order.
Rounding is uncorrelated with g, so the slope shows a wrong temperature far below the size of d.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.trajectory import Trajectory

MIN_TOKENS = 64
"""Fewer say nothing: a single token of small probability can be far off."""
SIGMAS = 8.0
"""Standard errors by which a slope must exceed its limit."""

SUMS = 5
"""Columns of `disagreement_of`: the fields of `Disagreement`."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Sums over some tokens. They add."""

    tokens: float = 0.0
    gaps: float = 0.0
    """Of min(|d|, 1), in nats."""
    squares: float = 0.0
    """Of min(|d|, 1) squared."""
    products: float = 0.0
    """Of d * g, where d is between -1 and 1."""
    slopes: float = 0.0
    """Of g squared."""

    def __add__(self, other: Self) -> Self:
        """The sums over both."""
        return type(self)(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def total(cls, rows: NDArray[np.float64]) -> Self:
        """The sum of `[B, SUMS]` rows of `disagreement_of`."""
        return cls(*rows.sum(0).tolist())

    @property
    def mean(self) -> float:
        """Mean of min(|d|, 1), in nats; 0 without tokens."""
        return self.gaps / self.tokens if self.tokens else 0.0

    @property
    def slope(self) -> float:
        """Logarithm of the engine's temperature over the trainer's, to first order."""
        return self.products / self.slopes if self.slopes else 0.0

    @property
    def slope_error(self) -> float:
        """Standard error of the slope; infinite where nothing can be said."""
        if self.tokens < MIN_TOKENS or self.slopes <= 0:
            return math.inf
        rest = max(0.0, self.squares - self.products**2 / self.slopes)
        return math.sqrt(rest / (self.tokens - 1) / self.slopes)


@dataclass(frozen=True, slots=True)
class Limits:
    """What rounding can explain, by how the engine computes."""

    mean: float
    """Of `Disagreement.mean`, in nats."""
    slope: float
    """Of the absolute value of `Disagreement.slope`."""

    def exceeded_by(self, found: Disagreement) -> bool:
        """Whether these tokens follow another policy than the trainer's."""
        if found.tokens < MIN_TOKENS:
            return False
        tilted = abs(found.slope) - SIGMAS * found.slope_error > self.slope
        return found.mean > self.mean or tilted


FLOAT32_CPU = Limits(mean=1e-3, slope=1e-3)
TENSOR_CORES = Limits(mean=0.1, slope=0.02)
"""bfloat16, and float32 on a GPU, where kernels may round products to TensorFloat-32.

docs/reliability.md derives the limits and has what healthy runs measured."""


def disagreement_of(
    logprobs: Tensor,
    entropy: Tensor,
    trajectories: Sequence[Trajectory],
    counted: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """`[B, SUMS]` sums over the tokens of each trajectory; one copy from the device.

    Args:
        logprobs: `[N]` the trainer's, of all response tokens of the trajectories in order, in nats.
        entropy: `[N]` of the distributions that they are from, in nats.
        trajectories: B, with what the engine recorded.
        counted: `[B]` whether a trajectory is wholly of the trainer's version; others get zeros.
    """
    logprobs = logprobs.detach().double()
    recorded = np.concatenate([one.behaviour_logprobs for one in trajectories])
    gap = (logprobs - torch.from_numpy(recorded).to(logprobs.device)).clamp(-1.0, 1.0)
    slope = logprobs + entropy.detach().double()
    columns = torch.stack([torch.ones_like(gap), gap.abs(), gap**2, gap * slope, slope**2], 1)
    lengths = [len(one.tokens) for one in trajectories]
    owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(gap.device)
    sums = columns.new_zeros(len(lengths), SUMS).index_add_(0, owner, columns)
    rows: NDArray[np.float64] = sums.cpu().numpy()
    return rows * counted[:, None]
