"""Corrections: pure functions of the log-ratios g of a micro-batch's tokens.

A token's own ratio e^g ignores how likely its prefix is now. The gradient keeps a bias even where
nothing is truncated, in exchange for a variance that does not grow with the length of samples.

A sample's ratio W = e^(sum of g) is the only weight whose expectation is the gradient of the
current policy. Its variance grows exponentially with the length, so for long samples it is used to
*reject*, by its geometric mean e^(mean of g), rather than to weigh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import sample_means, sample_sums


class Weights(NamedTuple):
    """Weights of N tokens, without gradients."""

    importance: Tensor
    """`[N]` weight of the token's score function; 0 where it is left out."""
    kept: Tensor
    """`[N]` 1, or 0 where the token is left out."""
    capped: Tensor
    """`[N]` bool: tokens whose weight was cut to `importance_cap`."""


class Correction(Protocol):
    """Pure: no state, no randomness."""

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Weigh tokens by `[N]` gradient-free log-ratios; `owners` `[N]` index their samples."""


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """Weight 1 for every token."""

    def __call__(self, log_ratio: Tensor, _owners: Tensor, /) -> Weights:
        """Return ones."""
        ones = torch.ones_like(log_ratio)
        return Weights(ones, ones, torch.zeros_like(ones, dtype=torch.bool))


def inside(ratio: Tensor, low: float, high: float) -> Tensor:
    """`[N]` bool: low <= ratio <= high."""
    return (ratio >= low) & (ratio <= high)


def truncated(ratio: Tensor, cap: float) -> Weights:
    """min(ratio, cap) of `[N]` ratios; nothing is left out."""
    return Weights(ratio.clamp(max=cap), torch.ones_like(ratio), ratio > cap)


def masked(weights: Weights, keep: Tensor) -> Weights:
    """Keep the weights where `keep` (`[N]` bool) is true, else 0."""
    found = torch.where(keep, weights.importance, 0.0)
    return Weights(found, keep.to(found.dtype), weights.capped & keep)


@dataclass(frozen=True, slots=True)
class TokenTruncated:
    """min(e^g, cap): truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561)."""

    cap: float

    def __call__(self, log_ratio: Tensor, _owners: Tensor, /) -> Weights:
        """Return truncated ratios; nothing is left out."""
        return truncated(torch.exp(log_ratio), self.cap)


@dataclass(frozen=True, slots=True)
class TokenMasked:
    """e^g inside the band, else 0 (IcePop, arXiv 2510.18855)."""

    low: float
    high: float

    def __call__(self, log_ratio: Tensor, _owners: Tensor, /) -> Weights:
        """Return ratios, and which tokens are left out."""
        ratio = torch.exp(log_ratio)
        return masked(truncated(ratio, torch.inf), inside(ratio, self.low, self.high))


@dataclass(frozen=True, slots=True)
class SequenceTruncated:
    """min(W, cap) for all tokens of a sample."""

    cap: float

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Return truncated ratios of samples; nothing is left out."""
        return truncated(torch.exp(sample_sums(log_ratio, owners)), self.cap)


@dataclass(frozen=True, slots=True)
class SequenceMasked:
    """W inside the band, else 0: the whole sample is left out."""

    low: float
    high: float

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Return ratios of samples, and which are left out."""
        ratio = torch.exp(sample_sums(log_ratio, owners))
        return masked(truncated(ratio, torch.inf), inside(ratio, self.low, self.high))


@dataclass(frozen=True, slots=True)
class SequenceRejected:
    """Truncates by token; leaves out samples whose geometric mean is outside the band."""

    low: float
    high: float
    cap: float

    def __call__(self, log_ratio: Tensor, owners: Tensor, /) -> Weights:
        """Return truncated ratios of tokens, and which samples are left out."""
        mean = torch.exp(sample_means(log_ratio, owners))
        weights = truncated(torch.exp(log_ratio), self.cap)
        return masked(weights, inside(mean, self.low, self.high))
