"""Corrections by each token's own ratio e^g.

The ratio of a token leaves out how likely its prefix is now. So the gradient keeps a bias even
where nothing is truncated, in exchange for a variance that does not grow with the length of
samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.trainer.corrections.base import Weights, inside, masked, truncated


@dataclass(frozen=True, slots=True)
class TokenTruncated:
    """min(e^g, cap): truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561)."""

    cap: float

    def __call__(self, log_ratio: Tensor, _owners: Tensor, /) -> Weights:
        """Truncated ratios; nothing is left out."""
        return truncated(torch.exp(log_ratio), self.cap)


@dataclass(frozen=True, slots=True)
class TokenMasked:
    """e^g inside the band, else 0 (IcePop, arXiv 2510.18855)."""

    low: float
    high: float

    def __call__(self, log_ratio: Tensor, _owners: Tensor, /) -> Weights:
        """Ratios, and which tokens are left out."""
        ratio = torch.exp(log_ratio)
        return masked(truncated(ratio, torch.inf), inside(ratio, self.low, self.high))
