"""Forward and backward pass of Llama-like models on a CPU core, in as few operations as possible.

transformers' forward pass of a layer is about 40 operations, and autograd's backward pass twice as
many. A small model's micro-batch spends more time in them than in matrix products. Here a layer is
four products (queries, keys and values at once; output; gate and up at once; down) and compiled
loops (`trainer.cpu.fused_kernels`), each with a backward pass written by hand. Attention needs
no padding, and a shared prompt is computed once.

    embed, norm -> [qkv, rotate, attend, output, add + norm, gate and up, gated, down, add + norm]

`why_not_trained_fused` says which models it is for. All others run through transformers' forward
pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from asyncrl.rollout.cpu import fused_kernels as common
from asyncrl.rollout.cpu.fused_kernels import LongArray
from asyncrl.rollout.cpu.fused_models import head_size, why_not_fused
from asyncrl.rollout.trajectory import FloatArray
from asyncrl.trainer.cpu import attention_kernels
from asyncrl.trainer.cpu import fused_kernels as kernels
from asyncrl.trainer.cpu.layers import OnednnLinear, fast_linear, whole_blocks

MAX_LENGTH = 512
"""Tokens of the longest sequence; beyond it torch's attention, in blocks, is faster."""

MAX_JOINED = 1 << 23
"""Numbers of joined gate and up (32 MiB) from which transformers' MLP is used: glibc maps larger
blocks afresh each time, and clearing their pages costs more than joining them saves."""

_Rotary = tuple[FloatArray, FloatArray]
"""`[positions, D]` cosines and sines."""


class _AddNorm(torch.autograd.Function):
    """`[T, C]` states plus a change (or None): the sum and its RMS norm."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, change: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        ctx.changed = change is not None
        out, inverse = torch.empty_like(states), states.new_empty(len(states))
        small = np.float32(epsilon)
        if change is None:
            total = states
            kernels.norm(states.numpy(), weight.numpy(), small, inverse.numpy(), out.numpy())
        else:
            total = torch.empty_like(states)
            kernels.add_and_norm(
                states.numpy(), change.numpy(), weight.numpy(), small,
                total.numpy(), inverse.numpy(), out.numpy(),
            )  # fmt: skip
        ctx.save_for_backward(total, inverse, weight)
        return (total.view_as(total) if change is None else total), out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, inverse, weight = ctx.saved_tensors
        for_states, for_weight = grads[0].clone(), torch.zeros_like(weight)
        kernels.norm_backward(
            total.numpy(), inverse.numpy(), weight.detach().numpy(), _array(grads[1]),
            for_states.numpy(), for_weight.numpy(),
        )  # fmt: skip
        return for_states, for_states if ctx.changed else None, for_weight, None


class _Gated(torch.autograd.Function):
    """SwiGLU of `[T, 2 I]`: `[T, I]`."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        out = both.new_empty(len(both), both.shape[1] // 2)
        common.gated(both.numpy(), out.numpy())
        ctx.save_for_backward(both)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        kernels.gated_backward(both.numpy(), _array(grads[0]), out.numpy())
        return out


class _Attention(torch.autograd.Function):
    """Norms of heads, rotary embedding and attention: `[T, (H + 2 J) D]` to `[T, H D]`."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        query_norm: Tensor,
        key_norm: Tensor,
        shape: _Heads,
        sequences: _Sequences,
    ) -> Tensor:
        rotated = packed.new_empty(len(packed), (shape.heads + shape.kv_heads) * shape.size)
        out = packed.new_zeros(len(packed), shape.heads * shape.size)
        log_sums = packed.new_empty(len(packed), shape.heads)
        kernels.rotate(
            packed.numpy(), shape.heads, shape.kv_heads, query_norm.numpy(), key_norm.numpy(),
            shape.epsilon, *sequences.rotary, sequences.positions, rotated.numpy(),
        )  # fmt: skip
        attention_kernels.attend(
            rotated.numpy(), packed.numpy(), shape.heads, shape.kv_heads, *sequences.segments,
            shape.scale, log_sums.numpy(), out.numpy(),
        )  # fmt: skip
        ctx.shape, ctx.sequences = shape, sequences
        ctx.save_for_backward(packed, rotated, log_sums, out, query_norm, key_norm)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        packed, rotated, log_sums, out, query_norm, key_norm = ctx.saved_tensors
        shape: _Heads = ctx.shape
        sequences: _Sequences = ctx.sequences
        result = torch.zeros_like(packed)
        attention_kernels.attend_backward(
            rotated.numpy(), packed.numpy(), shape.heads, shape.kv_heads, *sequences.segments,
            shape.scale, log_sums.numpy(), out.numpy(), _array(grads[0]), result.numpy(),
        )  # fmt: skip
        for_query, for_key = torch.zeros_like(query_norm), torch.zeros_like(key_norm)
        kernels.rotate_backward(
            packed.numpy(), shape.heads, shape.kv_heads,
            query_norm.detach().numpy(), key_norm.detach().numpy(),
            shape.epsilon, *sequences.rotary, sequences.positions,
            result.numpy(), for_query.numpy(), for_key.numpy(),
        )  # fmt: skip
        return result, for_query, for_key, None, None


def _array(grad: Tensor) -> FloatArray:
    out: FloatArray = grad.contiguous().numpy()
    return out


class _Heads:
    """Numbers of a layer's attention."""

    def __init__(self, attention: Any, config: Any) -> None:
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.size = int(attention.head_dim)
        self.scale = np.float32(attention.scaling)
        norm = getattr(attention, "q_norm", None)
        self.epsilon = np.float32(0 if norm is None else norm.variance_epsilon)


class _Layout(Protocol):
    """What is read of a `model.packing.Layout`, which imports this module's package."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def segments(self) -> tuple[tuple[int, int, int, int], ...]: ...
    @property
    def longest(self) -> int: ...


class _Sequences:
    """Positions, rotary angles and segments of a packed row."""

    def __init__(self, layout: _Layout, rotary: _Rotary) -> None:
        self.rotary = rotary
        self.positions: LongArray = layout.positions[0].numpy()
        starts, ends, places, shared = np.array(layout.segments, np.int64).T.copy()
        self.segments = (starts, ends, places, shared)


class FusedDecoder:
    """The forward pass of one model, with gradients. See `why_not_trained_fused`."""

    def __init__(self, model: Any) -> None:
        self._inner = model.model
        self._config = model.config
        self._heads = [_Heads(one.self_attn, model.config) for one in self._inner.layers]
        self._rotary = _angles(self._inner, 0)
        self._none = torch.empty(0)

    @property
    def first_layer(self) -> nn.Module:
        """Transformers' module; the gradients of its parameters pass through all layers."""
        first: nn.Module = self._inner.layers[0]
        return first

    def hidden(self, tokens: Tensor, layout: _Layout) -> Tensor:
        """`[T or more, C]` normed states of `[1, T]` tokens; the rows after T mean nothing."""
        if layout.longest > len(self._rotary[0]):
            self._rotary = _angles(self._inner, 2 * layout.longest)
        sequences = _Sequences(layout, self._rotary)
        inner = self._inner
        count = tokens.shape[1]
        ids = pad(tokens[0], (0, whole_blocks(count) - count))
        change: Tensor | None = None
        states = inner.embed_tokens(ids)
        for layer, heads in zip(inner.layers, self._heads, strict=True):
            states, normed = _add_norm(states, change, layer.input_layernorm)
            attention, mlp = layer.self_attn, layer.mlp
            packed = _joined(normed, attention.q_proj, attention.k_proj, attention.v_proj)
            norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
            weights = [self._none if one is None else one.weight for one in norms]
            mixed = _Attention.apply(packed, *weights, heads, sequences)
            states, normed = _add_norm(
                states, attention.o_proj(mixed), layer.post_attention_layernorm
            )
            if 2 * len(ids) * inner.config.intermediate_size >= MAX_JOINED:
                change = mlp(normed)
            else:
                both = _joined(normed, mlp.gate_proj, mlp.up_proj)
                change = mlp.down_proj(_Gated.apply(both))
        return _add_norm(states, change, inner.norm)[1]


def _add_norm(states: Tensor, change: Tensor | None, module: Any) -> tuple[Tensor, Tensor]:
    total, normed = _AddNorm.apply(states, change, module.weight, module.variance_epsilon)
    return total, normed


def _joined(x: Tensor, *layers: nn.Linear) -> Tensor:
    """The outputs of linear layers with the same input, side by side: one product."""
    weights: list[Tensor] = [one.weight for one in layers]
    weight = torch.cat(weights)
    of_layers: list[Tensor | None] = [one.bias for one in layers]
    biases = [one for one in of_layers if one is not None]
    bias = torch.cat(biases) if biases else None
    if isinstance(layers[0], OnednnLinear):
        return fast_linear(x, weight, bias)
    return linear(x, weight, bias)


def _angles(inner: Any, positions: int) -> _Rotary:
    """`[positions, D]` cosines and sines."""
    with torch.no_grad():
        cosines, sines = inner.rotary_emb(
            torch.empty(0), position_ids=torch.arange(max(1, positions))[None]
        )
    return cosines[0].contiguous().numpy(), sines[0].contiguous().numpy()


def why_not_trained_fused(model: Any, *, threads: int) -> str | None:
    """Why a model is trained through transformers' forward pass; None: it need not.

    Args:
        model: of transformers, loaded.
        threads: torch's, of the trainer.
    """
    window = getattr(model.config, "sliding_window", None) or MAX_LENGTH
    if window < MAX_LENGTH:
        return f"it has a sliding window of {window} tokens"
    reason = why_not_fused(model, threads=threads)
    if reason is None and head_size(model.config) % 4:
        return "its head size is not a multiple of 4"
    return reason
