"""The distribution that tokens are drawn from, and the draws.

A draw is a pure function of (distribution, seed of the request, position in the response): the
position-th output of a SplitMix64 stream (Steele, Lea, Flood 2014) started at the mixed seed gives
one uniform number, and the token is the inverse of the distribution's cumulative function there.
So neither the batch, nor the slot, nor the drafts can change which token a request writes; the
tests use that as the strongest form of "drafting is exact". What remains is rounding: logits
differ in the last bits with the shape of the batch, which moves a draw about once in 10^6.

A request that goes on after a *rejected* token needs a new seed: given the rejection, the old
number at that position is no longer uniform.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cache.trajectory import FloatArray, IntArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 50
"""Of a draw. Not 53: `u * total` must stay below `total` after rounding, for u near 1."""


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """`[N]` numbers in (0, 1), one for each seed and response position."""
    state = _mix(seeds + _GAMMA)
    bits = _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return ((bits >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) * 2.0**-_BITS


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def processed_logprobs(
    logits: torch.Tensor, temperature: FloatArray, top_p: FloatArray
) -> torch.Tensor:
    """`[N, V]` log-probabilities in float32 after temperature and top-p; -inf outside top-p.

    Args:
        logits: `[N, V]`, float32; may be overwritten.
        temperature: `[N]`, greater than 0.
        top_p: `[N]`, in (0, 1].
    """
    if bool((temperature != 1).any()):
        logits = logits.div_(torch.from_numpy(temperature).to(logits.device)[:, None])
    logprobs = torch.log_softmax(logits, dim=-1)
    cut = np.flatnonzero(top_p < 1)
    if len(cut):
        rows = torch.from_numpy(cut).to(logits.device)
        mass = torch.from_numpy(top_p[cut]).to(logits.device)
        logprobs[rows] = _nucleus(logprobs[rows], mass)
    return logprobs


def _nucleus(logprobs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most probable tokens that reaches `mass`, and renormalise."""
    ordered, index = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    before = torch.cumsum(probs, dim=-1, dtype=torch.float64) - probs
    kept = ordered.masked_fill(before >= mass[:, None], float("-inf"))
    kept = kept - torch.logsumexp(kept, dim=-1, keepdim=True)
    return torch.empty_like(logprobs).scatter_(-1, index, kept)


def draw(logprobs: torch.Tensor, numbers: NDArray[np.float64]) -> torch.Tensor:
    """`[N]` int64 tokens: the first whose cumulative mass exceeds the number's share of all.

    A token of no mass is never drawn: its cumulative mass equals its predecessor's. Where a
    distribution is not finite the token is -1.
    """
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    at = torch.from_numpy(numbers).to(logprobs.device) * total
    tokens = torch.searchsorted(cumulative, at[:, None], right=True).squeeze(-1)
    return tokens.masked_fill_(~torch.isfinite(total), -1)


def top_k(logprobs: torch.Tensor, k: int) -> tuple[IntArray, FloatArray]:
    """`[N, k]` most probable ids and their log-probabilities; -1 and -inf where none is left."""
    values, ids = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    out_ids = np.full((len(logprobs), k), -1, np.int32)
    out_values = np.full((len(logprobs), k), -np.inf, np.float32)
    out_ids[:, : ids.shape[1]] = ids.cpu().numpy()
    out_values[:, : ids.shape[1]] = values.float().cpu().numpy()
    out_ids[np.isneginf(out_values)] = -1
    return out_ids, out_values
