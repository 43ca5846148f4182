"""Forward and backward pass of Llama-like models on a CPU core, in as few operations as possible.

transformers' forward pass of a layer is about 40 operations, and autograd's backward pass twice as
many: more time than a small micro-batch's matrix products. Here a layer is four products and
compiled loops, each with a handwritten backward pass, without padding.

    embed, norm -> [qkv, rotate, attend, output, add + norm, gate and up, gated, down, add + norm]

`why_not_trained_fused` refuses other models, which run through transformers' forward pass.

Shapes of the compiled loops, all float32: T packed tokens (some kernels also take rows that fill up
a block), C hidden size, I intermediate size, H query heads, J key/value heads, D head size.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from asyncrl.rollout import cpu as common
from asyncrl.rollout.cpu import LongArray, exp, head_size, inverse_size, why_not_fused
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray
from asyncrl.trainer.cpu import attention_kernels
from asyncrl.trainer.cpu.layers import OnednnLinear, fast_linear, whole_blocks

kernel = kernels_of("trainer/cpu", "rollout")

_ONE = np.float32(1)
MAX_LENGTH = 512
"""Tokens of the longest sequence; beyond it torch's blocked attention is faster."""
MAX_JOINED = 1 << 23
"""Numbers of joined gate and up (32 MiB) from which transformers' MLP is used: glibc maps larger
blocks afresh each time, and clearing their pages costs more than joining saves."""


@kernel.of_vectors
def norm(
    states: FloatArray, weight: FloatArray, epsilon: np.float32, scales: FloatArray, out: FloatArray
) -> None:
    """RMS norm (arXiv 1910.07467, eq. 4) of `[T, C]`; `scales` `[T]` gets each row's factor."""
    for t in range(len(states)):
        factor = inverse_size(states[t], epsilon)
        scales[t] = factor
        for c in range(states.shape[1]):
            out[t, c] = states[t, c] * factor * weight[c]


@kernel.of_vectors
def add_and_norm(
    states: FloatArray,
    change: FloatArray,
    weight: FloatArray,
    epsilon: np.float32,
    total: FloatArray,
    inverse: FloatArray,
    out: FloatArray,
) -> None:
    """`total` = `states` + `change`, all `[T, C]`, and its RMS norm like `norm`."""
    for t in range(len(states)):
        for c in range(states.shape[1]):
            total[t, c] = states[t, c] + change[t, c]
    norm(total, weight, epsilon, inverse, out)


@kernel.of_vectors
def norm_backward(
    states: FloatArray,
    inverse: FloatArray,
    weight: FloatArray,
    grad: FloatArray,
    for_states: FloatArray,
    for_weight: FloatArray,
) -> None:
    """Add the gradients of `norm` to `for_states` `[T, C]` and `for_weight` `[C]`."""
    width = states.shape[1]
    for t in range(len(states)):
        factor = inverse[t]
        along = np.float32(0)
        for c in range(width):
            along += grad[t, c] * weight[c] * states[t, c]
        along *= factor * factor / np.float32(width)
        for c in range(width):
            x = states[t, c]
            for_states[t, c] += factor * (grad[t, c] * weight[c] - x * along)
            for_weight[c] += grad[t, c] * x * factor


@kernel.of_vectors
def gated_backward(both: FloatArray, grad: FloatArray, for_both: FloatArray) -> None:
    """Map the gradient of `gated`, `[T, I]`, to `[T, 2 I]`."""
    width = grad.shape[1]
    for t in range(len(grad)):
        gate, up, row = both[t, :width], both[t, width:], grad[t]
        for_gate, for_up = for_both[t, :width], for_both[t, width:]
        for i in range(width):
            share = _ONE / (_ONE + exp(-gate[i]))
            for_up[i] = row[i] * gate[i] * share
            for_gate[i] = row[i] * up[i] * share * (_ONE + gate[i] * (_ONE - share))


@kernel.of_vectors
def rotate(
    packed: FloatArray,
    heads: int,
    kv_heads: int,
    query_norm: FloatArray,
    key_norm: FloatArray,
    epsilon: np.float32,
    cosines: FloatArray,
    sines: FloatArray,
    positions: LongArray,
    out: FloatArray,
) -> None:
    """Norm and rotate queries and keys (arXiv 2104.09864, halves as in transformers).

    `packed` `[T or more, (H + 2 J) D]` has queries, keys and values of H `heads` and J `kv_heads`.
    `query_norm` and `key_norm` are the `[D]` weights of each head's norm, or `[0]`; `cosines` and
    `sines` are `[positions, D]`, `positions` `[T]`. Fills `out` `[T or more, (H + J) D]`.
    """
    size = cosines.shape[1]
    half = size // 2
    x = np.empty(size, np.float32)
    for t in range(len(positions)):
        at = positions[t]
        for head in range(heads + kv_heads):
            start = head * size
            weight = query_norm if head < heads else key_norm
            for d in range(size):
                x[d] = packed[t, start + d]
            if len(weight):
                factor = inverse_size(x, epsilon)
                for d in range(size):
                    x[d] *= factor * weight[d]
            for d in range(half):
                out[t, start + d] = x[d] * cosines[at, d] - x[d + half] * sines[at, d]
                out[t, start + half + d] = (
                    x[d + half] * cosines[at, d + half] + x[d] * sines[at, d + half]
                )


@kernel.of_vectors
def rotate_backward(
    packed: FloatArray,
    heads: int,
    kv_heads: int,
    query_norm: FloatArray,
    key_norm: FloatArray,
    epsilon: np.float32,
    cosines: FloatArray,
    sines: FloatArray,
    positions: LongArray,
    for_packed: FloatArray,
    for_query_norm: FloatArray,
    for_key_norm: FloatArray,
) -> None:
    """Compute the gradient of `rotate` in place.

    The first columns of `for_packed` `[T or more, (H + 2 J) D]` hold the gradient of `rotate`'s
    output, and then that of its input. Gradients of the norms' weights are added.
    """
    size = cosines.shape[1]
    half = size // 2
    grad = np.empty(size, np.float32)
    for t in range(len(positions)):
        at = positions[t]
        for head in range(heads + kv_heads):
            start = head * size
            row = for_packed[t, start : start + size]
            for d in range(half):
                grad[d] = row[d] * cosines[at, d] + row[d + half] * sines[at, d + half]
                grad[d + half] = row[d + half] * cosines[at, d + half] - row[d] * sines[at, d]
            weight = query_norm if head < heads else key_norm
            if not len(weight):
                for d in range(size):
                    row[d] = grad[d]
                continue
            for_weight = for_query_norm if head < heads else for_key_norm
            x = packed[t, start : start + size]
            factor = inverse_size(x, epsilon)
            along = np.float32(0)
            for d in range(size):
                along += grad[d] * weight[d] * x[d]
            along *= factor * factor / np.float32(size)
            for d in range(size):
                row[d] = factor * (grad[d] * weight[d] - x[d] * along)
                for_weight[d] += grad[d] * x[d] * factor


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
            norm(states.numpy(), weight.numpy(), small, inverse.numpy(), out.numpy())
        else:
            total = torch.empty_like(states)
            add_and_norm(
                states.numpy(), change.numpy(), weight.numpy(), small,
                total.numpy(), inverse.numpy(), out.numpy(),
            )  # fmt: skip
        ctx.save_for_backward(total, inverse, weight)
        return (total.view_as(total) if change is None else total), out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, inverse, weight = ctx.saved_tensors
        for_states, for_weight = grads[0].clone(), torch.zeros_like(weight)
        norm_backward(
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
        gated_backward(both.numpy(), _array(grads[0]), out.numpy())
        return out


class _Attention(torch.autograd.Function):
    """Norms of heads, rotary embedding and attention: `[T, (H + 2 J) D]` to `[T, H D]`."""

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        query_norm: Tensor,
        key_norm: Tensor,
        shape: "_Heads",
        sequences: "_Sequences",
    ) -> Tensor:
        rotated = packed.new_empty(len(packed), (shape.heads + shape.kv_heads) * shape.size)
        out = packed.new_zeros(len(packed), shape.heads * shape.size)
        log_sums = packed.new_empty(len(packed), shape.heads)
        rotate(
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
        rotate_backward(
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
    """Shape of a layer's attention."""

    def __init__(self, attention: Any, config: Any) -> None:
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.size = int(attention.head_dim)
        self.scale = np.float32(attention.scaling)
        norm = getattr(attention, "q_norm", None)
        self.epsilon = np.float32(0 if norm is None else norm.variance_epsilon)


class _Layout(Protocol):
    """The used part of a `model.packing.Layout`, which imports this module's package."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def segments(self) -> tuple[tuple[int, int, int, int], ...]: ...
    @property
    def longest(self) -> int: ...


class _Sequences:
    def __init__(self, layout: _Layout, rotary: tuple[FloatArray, FloatArray]) -> None:
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
        """`[T or more, C]` normed states of `[1, T]` tokens; rows after T are undefined."""
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
            mixed = attention.o_proj(_Attention.apply(packed, *weights, heads, sequences))
            states, normed = _add_norm(states, mixed, layer.post_attention_layernorm)
            if 2 * len(ids) * inner.config.intermediate_size >= MAX_JOINED:
                change = mlp(normed)
            else:
                both = _joined(normed, mlp.gate_proj, mlp.up_proj)
                change = mlp.down_proj(_Gated.apply(both))
        return _add_norm(states, change, inner.norm)[1]


def _add_norm(states: Tensor, change: Tensor | None, module: Any) -> tuple[Tensor, Tensor]:
    total, normed = _AddNorm.apply(states, change, module.weight, module.variance_epsilon)
    return total, normed


def _joined(x: Tensor, *layers: Any) -> Tensor:
    """Compute linear layers with the same input as one product, outputs side by side."""
    biases = [one.bias for one in layers if one.bias is not None]
    bias = torch.cat(biases) if biases else None
    compute = fast_linear if isinstance(layers[0], OnednnLinear) else linear
    return compute(x, torch.cat([one.weight for one in layers]), bias)


def _angles(inner: Any, positions: int) -> tuple[FloatArray, FloatArray]:
    with torch.no_grad():
        at = torch.arange(max(1, positions))[None]
        cosines, sines = inner.rotary_emb(torch.empty(0), position_ids=at)
    return cosines[0].contiguous().numpy(), sines[0].contiguous().numpy()


def why_not_trained_fused(model: Any, *, threads: int) -> str | None:
    """Return why a model must use transformers' forward pass, or None."""
    window = getattr(model.config, "sliding_window", None) or MAX_LENGTH
    if window < MAX_LENGTH:
        return f"it has a sliding window of {window} tokens"
    reason = why_not_fused(model, threads=threads)
    if reason is None and head_size(model.config) % 4:
        return "its head size is not a multiple of 4"
    return reason
