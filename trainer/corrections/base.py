"""What a correction is: a pure function of the log-ratios of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Weights(NamedTuple):
    """What is made of N tokens, without gradients."""

    importance: Tensor
    """`[N]` weight of the token's score function; 0 where it is left out."""
    kept: Tensor
    """`[N]` 1, or 0 where the token is left out."""
    capped: Tensor
    """`[N]` bool: tokens whose weight was cut to `importance_cap`."""


class Correction(Protocol):
    """Pure: no state, no randomness."""

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Weights of tokens.

        Args:
            log_ratio: `[N]` current minus behaviour log-probability, without a gradient.
            owners: `[N]` int64 index of the token's sample.
        """


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """1 for every token."""

    def __call__(self, log_ratio: Tensor, _owners: Tensor, /) -> Weights:
        """All ones."""
        ones = torch.ones_like(log_ratio)
        return Weights(ones, ones, torch.zeros_like(ones, dtype=torch.bool))


def inside(ratio: Tensor, low: float, high: float) -> Tensor:
    """`[N]` bool: low <= ratio <= high."""
    return (ratio >= low) & (ratio <= high)


def truncated(ratio: Tensor, cap: float) -> Weights:
    """min(ratio, cap) of `[N]` ratios; nothing is left out."""
    return Weights(ratio.clamp(max=cap), torch.ones_like(ratio), ratio > cap)


def masked(weights: Weights, keep: Tensor) -> Weights:
    """The weights where `keep` (`[N]` bool) is true, else 0."""
    found = torch.where(keep, weights.importance, 0.0)
    return Weights(found, keep.to(found.dtype), weights.capped & keep)
