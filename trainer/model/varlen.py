"""Attention of packed rows on a GPU, without padding, by torch's variable-length kernel.

The kernel takes queries, keys and values of all sequences one after another, and where each ends.
Queries are the row itself; keys and values are copied, since shared tokens are in the row once:

    row       p p p a a b b b        p: a prompt, a and b: two responses to it
    queries   |p p p|a a|b b b|
    keys      |p p p|p p p a a|p p p b b b|

The kernel is for 16-bit types on CUDA; all else is padded (`trainer.model.packing`). If there are
fewer queries than keys, its causal mask is that of the last queries.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from asyncrl.trainer.algorithms.base import to_device

MAX_HEAD = 256
_LOW = (torch.bfloat16, torch.float16)
_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if several query heads may share a key head. In torch 2.11 they may not."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Places of each segment's queries and keys. N segments, T tokens in the row, K keys."""

    order: Tensor | None
    """`[K]` int64: the row's token of each key; None if nothing is shared: the row itself."""
    query_ends: Tensor
    """`[N + 1]` int32, from 0."""
    key_ends: Tensor
    """`[N + 1]` int32, from 0."""
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int, int, int]], device: torch.device) -> Self:
        """Derive from `Layout.segments`."""
        starts, ends, _, shared = np.array(segments, np.int64).T
        queries = ends - starts
        keys = queries + shared
        order = None
        if shared.any():
            parts: list[Any] = []
            for start, end, place, count in segments:
                parts += [np.arange(place, place + count), np.arange(start, end)]
            order = to_device(np.concatenate(parts), device)

        def ends_of(counts: Any) -> Tensor:
            return to_device(np.append(0, np.cumsum(counts)).astype(np.int32), device)

        return cls(order, ends_of(queries), ends_of(keys), int(queries.max()), int(keys.max()))


class _InOrder(torch.autograd.Function):
    """`[T, H, D]` to `[K, H, D]`. Gradients of a shared token are summed in float32 or more."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, order: Tensor) -> Tensor:
        ctx.tokens = len(packed)
        ctx.save_for_backward(order)
        return packed.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (order,) = ctx.saved_tensors
        (grad,) = grads
        kind = torch.promote_types(grad.dtype, torch.float32)
        sums = grad.new_zeros(ctx.tokens, *grad.shape[1:], dtype=kind)
        return sums.index_add_(0, order, grad.to(kind)).to(grad.dtype), None


def _kind(query: Tensor) -> torch.dtype:
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def serves(query: Tensor) -> bool:
    """Return True if the kernel supports `[1, H, T, D]` queries, their device and compute type."""
    return query.is_cuda and _kind(query) in _LOW and query.shape[-1] <= MAX_HEAD


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Keys, *, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention within segments: `[1, H, T, D]` and `[1, H_kv, T, D]` to `[1, T, H, D]`.

    The scores' scale defaults to 1 / sqrt(D). A token attends to `window` keys, by default all.
    """
    kind = _kind(q)
    queries, heads, values = (one[0].transpose(0, 1).to(kind) for one in (q, k, v))
    if keys.order is not None:
        heads, values = (_InOrder.apply(one, keys.order) for one in (heads, values))
    shared = queries.shape[1] // heads.shape[1]
    grouped: dict[str, Any] = {}
    if _GROUPED:
        grouped = {"enable_gqa": shared > 1}
    elif shared > 1:
        heads, values = (one.repeat_interleave(shared, 1) for one in (heads, values))
    queries, heads, values = (one.contiguous() for one in (queries, heads, values))
    ends = (keys.query_ends, keys.key_ends, keys.max_queries, keys.max_keys)
    seen = (-1 if window is None else window - 1, 0)
    out = varlen_attn(queries, heads, values, *ends, scale=scale, window_size=seen, **grouped)
    assert isinstance(out, Tensor)  # noqa: S101 - a tuple only where more is asked for
    return out[None]
