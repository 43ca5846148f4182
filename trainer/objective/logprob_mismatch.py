"""Distance of an engine's log-probabilities from the trainer's, on tokens of one policy.

For a token x that an engine drew under exactly the trainer's version, d = trainer's minus engine's
log-probability is rounding if both have the same policy. Two numbers are judged:

    mean   of min(|d|, 1): rounding keeps it small whatever happens
    slope  of the regression of d on g = log p(x) + H(p), without intercept

g is the derivative of log p(x) with respect to the logarithm of the inverse temperature. So an
engine that samples at temperature T * exp(slope) in place of T has d = slope * g to first order.
Rounding is uncorrelated with g, so the slope shows a wrong temperature far below the size of d.

Where a policy is sure of its token, d and g are both near 0, so a few uncertain tokens may decide
the slope, and the residuals of all tokens do not show its error. So a slope is judged by a ratio,
with e = d - limit * g:

    sum of sign(g) * e  /  root of (sum of e**2)

If the slope is at the limit and the signs of e are random, the ratio exceeds x with a probability
below exp(-x**2 / 2), however large or small each e is (Hoeffding). It is at most the root of the
number of tokens, so a few deciding tokens cannot exceed it.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from asyncrl.rollout.trajectory import BoolArray, Trajectory
from asyncrl.trainer.algorithms.base import behaviour_logprobs_of, to_device

MIN_TOKENS = 64
"""Fewer tokens say nothing: a single one of small probability can be far off."""
MIN_RATIO = 7.0
"""A higher ratio means a higher slope; by chance, once in 2 * 10**10 checks of either sign."""

SUMS = 7


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Sums over some tokens. They add. d is cut to -1 and 1."""

    tokens: float = 0.0
    gaps: float = 0.0
    """Sum of min(|d|, 1), in nats."""
    squares: float = 0.0
    """Sum of d**2."""
    products: float = 0.0
    """Sum of d * g."""
    slopes: float = 0.0
    """Sum of g**2."""
    signed: float = 0.0
    """Sum of d * sign(g)."""
    sizes: float = 0.0
    """Sum of |g|."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(other)))

    @classmethod
    def total(cls, rows: Tensor) -> Self:
        """Sum the `[B, SUMS]` rows of `disagreement_of`."""
        return cls(*rows.sum(0).tolist())

    @property
    def mean(self) -> float:
        """Mean of min(|d|, 1), in nats; 0 without tokens."""
        return self.gaps / self.tokens if self.tokens else 0.0

    @property
    def slope(self) -> float:
        """Logarithm of the engine's temperature over the trainer's, to first order."""
        return self.products / self.slopes if self.slopes else 0.0

    def ratio_beyond(self, limit: float) -> float:
        """The module's ratio; above MIN_RATIO, |slope| exceeds this limit."""
        side = math.copysign(1.0, self.signed)
        over = abs(self.signed) - limit * self.sizes
        scale = self.squares - 2 * limit * side * self.products + limit**2 * self.slopes
        return over / math.sqrt(scale) if over > 0 and scale > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest mismatch that rounding can explain, by how the engine computes."""

    mean: float
    slope: float

    def exceeded_by(self, found: Disagreement) -> bool:
        """Return True if these tokens follow another policy than the trainer's."""
        if found.tokens < MIN_TOKENS:
            return False
        return found.mean > self.mean or found.ratio_beyond(self.slope) > MIN_RATIO


FLOAT32_CPU = Limits(mean=1e-3, slope=1e-3)
TENSOR_CORES = Limits(mean=0.1, slope=0.02)
"""Limits of bfloat16, and of float32 on a GPU, where kernels may round to TensorFloat-32.
docs/exactness.md derives them and lists what healthy runs measured."""
ROUTED_TENSOR_CORES = Limits(mean=0.3, slope=0.06)
"""Limits of mixtures of experts, where rounding sends some tokens to other experts."""


def disagreement_of(
    logprobs: Tensor, entropy: Tensor, trajectories: Sequence[Trajectory], counted: BoolArray
) -> Tensor:
    """Return `[B, SUMS]` float64 sums over the tokens of each trajectory, on the device, unread.

    `logprobs` and `entropy` `[N]` are the trainer's, in nats, of all trained tokens in order.
    `counted` `[B]` is True if a trajectory is wholly of the trainer's version; others get zeros.
    """
    logprobs = logprobs.detach().double()
    recorded = behaviour_logprobs_of(trajectories)
    device = logprobs.device
    gap = (logprobs - to_device(recorded, device)).clamp(-1.0, 1.0)
    slope = logprobs + entropy.detach().double()
    ones, sign = torch.ones_like(gap), slope.sign()
    parts = [ones, gap.abs(), gap**2, gap * slope, slope**2, gap * sign, slope.abs()]
    columns = torch.stack(parts, 1)
    lengths = [one.trained_count for one in trajectories]
    owner = to_device(np.repeat(np.arange(len(lengths)), lengths), device)
    sums = columns.new_zeros(len(lengths), SUMS).index_add_(0, owner, columns)
    return sums * to_device(counted, device)[:, None]
