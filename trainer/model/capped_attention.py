"""Causal attention with capped scores or sinks, which torch's kernels do not compute.

The formula is that of `asyncrl.rollout.attention`. Scores exist for a block of queries at a time,
and the backward pass computes them again, so memory grows with the sequence and not with its
square. It costs about three times what a fused kernel does: use it for the models that need it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.rollout.attention import capped, weights_of

SCORE_BUDGET = 1 << 25
"""Scores (numbers) in memory at once."""


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`query` `[B, H, L, D]`, `key` and `value` `[B, H_kv, L, D]` to `[B, H, L, D]`.

    Args:
        query: of every position.
        key: likewise.
        value: likewise.
        scale: of scores; None: 1 / sqrt(D).
        window: keys that a query sees, its own among them; None: all before it.
        softcap: bound of scores; None: none.
        sinks: `[H]` score of a key without a value; None: none.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    scale = size**-0.5 if scale is None else scale
    rows = max(1, SCORE_BUDGET // (batch * heads * length))
    out = []
    for start in range(0, length, rows):
        end = min(length, start + rows)
        low = 0 if window is None else max(0, start + 1 - window)
        block = partial(_attend, first=start, low=low, scale=scale, window=window, softcap=softcap)
        parts = (query[:, :, start:end], key[:, :, low:end], value[:, :, low:end], sinks)
        out.append(
            block(*parts)
            if rows >= length
            else checkpoint(block, *parts, use_reentrant=False, preserve_rng_state=False)
        )
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    first: int,
    low: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Queries from position `first` on, and the keys that they may see, from position `low` on."""
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = capped(scores, softcap)
    at = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
    keys = torch.arange(low, low + key.shape[2], device=query.device)[None, :]
    hidden = keys > at
    if window is not None:
        hidden |= keys <= at - window
    scores = scores.masked_fill(hidden, -torch.inf)
    by_head = None if sinks is None else sinks.view(1, -1, 1, 1)
    return weights_of(scores, by_head).to(value.dtype) @ value
