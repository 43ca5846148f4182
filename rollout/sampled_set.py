"""The set of tokens that truncation leaves in; `rollout.truncation` defines it."""

from __future__ import annotations

import math

import torch

from rollout.truncation import Truncation


def inside(
    logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`[N, V]` bool: the tokens that may be drawn. At least one token of each row is.

    Operations that no row asks for cost nothing; only top_p sorts.

    Args:
        logprobs: `[N, V]` normalised, after temperature.
        top_k: `[N]` int64; 0: off.
        top_p: `[N]` float32; 1: off.
        min_p: `[N]` float32; 0: off.
    """
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    largest = min(int(top_k.max()), logprobs.shape[-1])
    if largest > 0:
        kept = _top_k(logprobs, top_k, largest)
    if bool((top_p < 1).any()):
        left = logprobs
        if largest > 0:
            left = logprobs.masked_fill(~kept, -math.inf)
            left = left - torch.logsumexp(left, dim=-1, keepdim=True)
        kept &= _nucleus(left, top_p)
    if bool((min_p > 0).any()):
        kept &= logprobs >= logprobs.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    return kept


def inside_one(logprobs: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """`[N, V]` bool: as `inside`, with the same settings for every row."""
    n, device = len(logprobs), logprobs.device
    return inside(
        logprobs,
        torch.full((n,), truncation.top_k, dtype=torch.int64, device=device),
        torch.full((n,), truncation.top_p, dtype=torch.float32, device=device),
        torch.full((n,), truncation.min_p, dtype=torch.float32, device=device),
    )


def _top_k(logprobs: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    best = torch.topk(logprobs, largest, dim=-1).values
    edge = best.gather(-1, top_k.clamp(1, largest)[:, None] - 1)
    return logprobs >= edge.masked_fill((top_k == 0)[:, None], -math.inf)


def _nucleus(logprobs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The smallest set of most probable tokens that reaches `mass`; all where it is 1."""
    ordered, index = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    before = torch.cumsum(probs, dim=-1, dtype=torch.float64) - probs
    # Without the second term, rounding would leave out unlikely tokens of a row without top-p.
    kept = (before < mass[:, None]) | (mass >= 1)[:, None]
    return torch.zeros_like(kept).scatter(-1, index, kept)
