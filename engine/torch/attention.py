"""The keys that each token attends to, and attention under a mask and a layer's score rule.

torch's kernels compute plain scores. Capped ones and sinks are written out
(`asyncrl.rollout.model_parts`), and so take several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.rollout.model_parts import capped, weights_of
from asyncrl.rollout.trajectory import IntArray

BoolArray = NDArray[np.bool_]
Hidden = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Row, query and key of masked pairs among a row's new tokens, both counted from its first one."""
SCORE_BUDGET = 1 << 25
"""Scores (numbers) of a fresh context in memory at once, if they are written out or masked."""


@dataclass(frozen=True, slots=True)
class AttendedKeys:
    """The keys of each of T packed tokens: `first` to `last` of its slot but the hidden ones."""

    slot: NDArray[np.int64]
    """`[T]`"""
    first: NDArray[np.int64]
    """`[T]`"""
    last: NDArray[np.int64]
    """`[T]` the token's place."""
    base: NDArray[np.int64]
    """`[T]` place of its row's first new token; column 0 of `hidden`."""
    hidden: NDArray[np.bool_]
    """`[T, Q]` new tokens of its row on other paths of its tree; `[T, 0]`: none."""
    packed: bool
    """True if the keys are the packed tokens themselves, as one slot; otherwise those of slots."""

    @classmethod
    def over_slots(
        cls,
        slot: NDArray[np.int64],
        place: NDArray[np.int64],
        lengths: IntArray,
        counts: IntArray,
        pairs: Hidden | None,
    ) -> AttendedKeys:
        """Let a step's tokens see the keys of their slots up to their own places, `[T]` each.

        Rows that decode come first, with `lengths` `[m]` valid keys and `counts` `[m]` new tokens;
        `pairs` are hidden among these; None: nothing.
        """
        base = np.zeros_like(place)
        hidden = np.zeros((len(place), 0), np.bool_)
        if pairs is not None and len(pairs[0]):
            row, query, key = pairs
            base[: int(counts.sum())] = np.repeat(lengths, counts)
            hidden = np.zeros((len(place), int(counts.max())), np.bool_)
            hidden[(np.cumsum(counts) - counts)[row] + query, key] = True
        return cls(slot, np.zeros_like(place), place, base, hidden, packed=False)

    @classmethod
    def within(cls, lengths: NDArray[np.integer]) -> AttendedKeys:
        """Pack whole contexts of `[r]` lengths one after another, without slots."""
        tokens = np.arange(int(lengths.sum()))
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int64)
        hidden = np.zeros((len(tokens), 0), np.bool_)
        return cls(np.zeros_like(tokens), starts, tokens, starts, hidden, packed=True)

    def within_window(self, positions: NDArray[np.int64], window: int) -> AttendedKeys:
        """Drop keys `window` or more positions before their token; `positions` are `[T]`."""
        oldest = positions - (window - 1)
        first, hidden = np.maximum(self.first, self.first + oldest), self.hidden
        in_tree = np.flatnonzero(self.base > 0) if hidden.shape[1] else np.empty(0, np.int64)
        if len(in_tree):
            # Places are positions up to `base` only. After it, old keys are hidden.
            first[in_tree] = np.clip(oldest[in_tree], 0, self.base[in_tree])
            row = in_tree - (self.last[in_tree] - self.base[in_tree])
            columns = np.minimum(row[:, None] + np.arange(hidden.shape[1]), len(positions) - 1)
            hidden = hidden.copy()
            hidden[in_tree] |= positions[columns] < oldest[in_tree, None]
        return replace(self, first=first, hidden=hidden)


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, rule: ScoreRule
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
        query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=q.shape[2] != k.shape[2]
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
