"""Corrections: weights for tokens that another policy drew than the one that trains on them.

With g = log of current over behaviour probability of a token, and sums and means over its sample:

    name                  weight of a token                               source
    token_truncated       min(e^g, cap)                                   Ionides 2008; 1802.01561
    token_masked          e^g inside the band, else 0                     IcePop, 2510.18855
    sequence_truncated    min(e^(sum g), cap)                             Ionides 2008
    sequence_masked       e^(sum g) inside the band, else 0
    sequence_rejected     min(e^g, cap) where e^(mean g) is in the band, else 0
    none                  1

A token that is left out stays in the loss's denominator: a step that leaves out much is smaller,
not noisier. On-policy g is rounding, every weight is 1, and nothing is left out.

A token's own ratio e^g ignores how likely its prefix is now. The gradient keeps a bias even where
nothing is truncated, in exchange for a variance that does not grow with the length of samples.

A sample's ratio e^(sum g) is the only weight whose expectation is the gradient of the current
policy. Its variance grows exponentially with the length, so for long samples it is used to
*reject*, by its geometric mean e^(mean g), rather than to weigh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import sample_means, sample_sums
from asyncrl.trainer.base.config import TrainerConfig


class Weights(NamedTuple):
    """Weights of N tokens, without gradients."""

    importance: Tensor
    """`[N]` weight of the token's score function; 0 where it is left out."""
    kept: Tensor
    """`[N]` 1, or 0 where the token is left out."""
    capped: Tensor
    """`[N]` bool: tokens whose weight was cut to `importance_cap`."""


Correction = Callable[[Tensor, Tensor], Weights]
"""Weighs tokens by `[N]` gradient-free log-ratios and the `[N]` indices of their samples. Pure."""


def make(config: TrainerConfig) -> Correction:
    """Return the configured correction."""
    kind, (low, high) = config.correction, config.band_of_correction
    cap = torch.inf if kind.endswith("masked") else config.importance_cap

    def weigh(log_ratio: Tensor, owners: Tensor) -> Weights:
        if kind == "none":
            ones = torch.ones_like(log_ratio)
            return Weights(ones, ones, torch.zeros_like(ones, dtype=torch.bool))
        by_sample = kind in ("sequence_truncated", "sequence_masked")
        ratio = torch.exp(sample_sums(log_ratio, owners) if by_sample else log_ratio)
        weights, capped = ratio.clamp(max=cap), ratio > cap
        if kind.endswith("truncated"):
            return Weights(weights, torch.ones_like(ratio), capped)
        if kind == "sequence_rejected":
            ratio = torch.exp(sample_means(log_ratio, owners))
        keep = (ratio >= low) & (ratio <= high)
        weights = torch.where(keep, weights, 0.0)
        return Weights(weights, keep.to(weights.dtype), capped & keep)

    return weigh
