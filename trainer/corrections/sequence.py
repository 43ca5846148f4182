"""Corrections by the ratio of a whole sample: W = e^(sum of g) over its tokens.

W is the only weight whose expectation is the gradient of the current policy, because it accounts
for the prefix of each token. Its variance grows exponentially with the length, so for long samples
it is used to *reject*, by its geometric mean e^(mean of g), rather than to weigh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.sequences import sample_means, sample_sums
from asyncrl.trainer.corrections.base import Weights, inside, masked, truncated


@dataclass(frozen=True, slots=True)
class SequenceTruncated:
    """min(W, cap) for all tokens of a sample."""

    cap: float

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Truncated ratios of samples; nothing is left out."""
        return truncated(torch.exp(sample_sums(log_ratio, owners)), self.cap)


@dataclass(frozen=True, slots=True)
class SequenceMasked:
    """W inside the band, else 0: the whole sample is left out."""

    low: float
    high: float

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Ratios of samples, and which are left out."""
        ratio = torch.exp(sample_sums(log_ratio, owners))
        return masked(truncated(ratio, torch.inf), inside(ratio, self.low, self.high))


@dataclass(frozen=True, slots=True)
class SequenceRejected:
    """Samples whose geometric mean is outside the band are left out, others truncated by token."""

    low: float
    high: float
    cap: float

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Truncated ratios of tokens, and which samples are left out."""
        mean = torch.exp(sample_means(log_ratio, owners))
        weights = truncated(torch.exp(log_ratio), self.cap)
        return masked(weights, inside(mean, self.low, self.high))
