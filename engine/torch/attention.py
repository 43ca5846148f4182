"""Attention of queries against keys under a mask and a layer's score rule.

torch's kernels compute plain scores. Capped ones and sinks are written out
(`asyncrl.rollout.model_parts`), and so take several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.rollout.model_parts import capped, weights_of

SCORE_BUDGET = 1 << 25
"""Scores (numbers) of a fresh context in memory at once, if they are written out or masked."""


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """A layer's rule for attention scores."""

    scaling: float | None = None
    """Scale of scores; None: by the square root of D."""
    window: int | None = None
    """Keys that a query sees, including its own; None: all before it."""
    softcap: float | None = None
    """Bound of scores; None: none."""
    sinks: torch.Tensor | None = None
    """`[H]` score of a key without a value; None: none."""

    @property
    def is_written_out(self) -> bool:
        """True if torch has no kernel for it."""
        return self.softcap is not None or self.sinks is not None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attend under a mask, ignoring the rule's window; return `[m, J, G * Q, E]`.

    `query` is `[m, J, G * Q, D]`, the G query heads of a key head one after another, `key` `[m, J,
    L, D]`, `value` `[m, J, L, E]`, and `mask` `[m or 1, 1, G * Q, L]` additive.
    """
    if not rule.is_written_out:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling)
    _, kv_heads, folded, size = query.shape
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = capped(scores * (size**-0.5 if rule.scaling is None else rule.scaling), rule.softcap)
    scores += mask
    sinks = rule.sinks
    if sinks is not None:
        groups = len(sinks) // kv_heads
        sinks = sinks.view(kv_heads, groups).repeat_interleave(folded // groups, 1)[
            None, :, :, None
        ]
    return weights_of(scores, sinks).to(value.dtype) @ value


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Attend causally within rows `[m, Q, heads, D]`, whose padding comes last."""
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    length = query.shape[2]
    has_window = rule.window is not None and rule.window < length
    if has_window or rule.is_written_out:
        return _causal_in_parts(query, key, value, rule).transpose(1, 2)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=rule.scaling,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _causal_in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Attend causally within `[m, H, Q, D]`, some queries at a time with the keys that they see."""
    m, heads, length, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    many = max(1, SCORE_BUDGET // (m * heads * length))
    out = []
    for start in range(0, length, many):
        end = min(length, start + many)
        low = 0 if rule.window is None else max(0, start + 1 - rule.window)
        at = torch.arange(start, end, device=query.device)[:, None]
        keys = torch.arange(low, end, device=query.device)[None, :]
        hidden = keys > at
        if rule.window is not None:
            hidden |= keys <= at - rule.window
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        part = query[:, :, start:end].reshape(m, kv_heads, groups * (end - start), size)
        wide = mask.repeat(groups, 1)[None, None]
        attended = attend(part, key[:, :, low:end], value[:, :, low:end], wide, rule)
        out.append(attended.view(m, heads, end - start, -1))
    return torch.cat(out, 2)
