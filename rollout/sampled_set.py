"""The set of tokens that truncation leaves in; `asyncrl.rollout.truncation` defines it."""

import math

import torch

from asyncrl.rollout.truncation import Truncation


def left_out(
    logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return `[N, V]` bool: the tokens that may not be drawn, never all of a row.

    `logprobs` `[N, V]` are normalised, after temperature. `top_k` (int64; 0: off), `top_p`
    (float32; 1: off) and `min_p` (float32; 0: off) are `[N]`. An operation that no row uses costs
    nothing; only top_p sorts. The settings are read from the tensors, which synchronizes with the
    device.
    """
    asked = Truncation(
        top_k=max(0, int(top_k.max())), top_p=float(top_p.min()), min_p=float(min_p.max())
    )
    return _left_out(logprobs, top_k, top_p, min_p, asked)


def _left_out(
    logprobs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    asked: Truncation,
) -> torch.Tensor:
    """Do `left_out`; `asked` has the strictest value of each setting over all rows."""
    out: torch.Tensor | None = None
    largest = min(asked.top_k, logprobs.shape[-1])
    if largest > 0:
        out = _beyond_top_k(logprobs, top_k, largest)
    if asked.top_p < 1:
        left = logprobs
        if out is not None:
            left = logprobs.masked_fill(out, -math.inf)
            left = left - torch.logsumexp(left, dim=-1, keepdim=True)
        beyond = _beyond_nucleus(left, top_p)
        out = beyond if out is None else out.logical_or_(beyond)
    if asked.min_p > 0:
        rare = logprobs < logprobs.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
        out = rare if out is None else out.logical_or_(rare)
    return torch.zeros_like(logprobs, dtype=torch.bool) if out is None else out


def left_out_by(truncation: Truncation, logprobs: torch.Tensor) -> torch.Tensor:
    """Do `left_out` with the same settings for every row, without waiting for the device."""
    n, device = len(logprobs), logprobs.device
    return _left_out(
        logprobs,
        torch.full((n,), truncation.top_k, dtype=torch.int64, device=device),
        torch.full((n,), truncation.top_p, dtype=torch.float32, device=device),
        torch.full((n,), truncation.min_p, dtype=torch.float32, device=device),
        truncation,
    )


def _beyond_top_k(logprobs: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    best = torch.topk(logprobs, largest, dim=-1).values
    edge = best.gather(-1, top_k.clamp(1, largest)[:, None] - 1)
    return logprobs < edge.masked_fill((top_k == 0)[:, None], -math.inf)


def _beyond_nucleus(logprobs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return all but the smallest set of most probable tokens that reaches `mass`; none for 1."""
    ordered, index = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    probs = ordered.exp_()
    before = torch.cumsum(probs, dim=-1, dtype=torch.float64).sub_(probs)
    # By rounding, the tokens before an unlikely one may reach 1 without it.
    beyond = before >= mass.masked_fill(mass >= 1, math.inf)[:, None]
    beyond[:, 0] = False  # a mass below the smallest float32 is 0
    return torch.empty_like(beyond).scatter_(-1, index, beyond)
