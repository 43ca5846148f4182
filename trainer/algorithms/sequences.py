"""Sums over the samples of a micro-batch: N tokens, of which each knows its sample."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import TokenBatch


def owners_of(batch: TokenBatch) -> Tensor:
    """`[N]` int64 index of each token's sample."""
    if batch.owners is None:
        return torch.zeros_like(batch.logprobs, dtype=torch.int64)
    return batch.owners


def sample_sums(values: Tensor, owners: Tensor) -> Tensor:
    """`[N]` values to `[N]` sums over their sample, at each of its tokens. Keeps gradients."""
    return values.new_zeros(len(values)).index_add(0, owners, values)[owners]


def sample_means(values: Tensor, owners: Tensor) -> Tensor:
    """`[N]` values to `[N]` means over their sample, at each of its tokens. Keeps gradients."""
    return sample_sums(values, owners) / sample_sums(torch.ones_like(values), owners)


def sums_to_go(values: Tensor, owners: Tensor) -> Tensor:
    """`[N]` values to `[N]` sums over the token and those after it in its sample.

    Samples lie one after another, so the sum over a sample's end is that over all tokens up to it.
    """
    whole = values.double()
    up_to = whole.cumsum(0)
    ends = whole.new_zeros(len(values)).index_add(0, owners, whole).cumsum(0)[owners]
    return (ends - up_to + whole).to(values.dtype)
