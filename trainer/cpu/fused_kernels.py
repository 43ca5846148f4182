"""Compiled kernels of `trainer.fused`: forward and backward of what lies between two products.

Shapes: T packed tokens (some kernels also take rows that fill up a block), C hidden size, I
intermediate size, H query heads, J key/value heads, D head size. All numbers are float32.
"""

from __future__ import annotations

import numpy as np

from asyncrl.rollout.cpu.fused_kernels import LongArray, exp, inverse_size
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("trainer/cpu", "rollout")

_ONE = np.float32(1)


@kernel.of_vectors
def norm(
    states: FloatArray,
    weight: FloatArray,
    epsilon: np.float32,
    inverse: FloatArray,
    out: FloatArray,
) -> None:
    """RMS norm (arXiv 1910.07467, eq. 4) of `[T, C]`; `inverse` `[T]` gets each row's factor."""
    for t in range(len(states)):
        factor = inverse_size(states[t], epsilon)
        inverse[t] = factor
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
    """`total` = `states` + `change`, all `[T, C]`, and its RMS norm as `norm`."""
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
    """Gradient of `gated`: `[T, I]` to `[T, 2 I]`."""
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

    Args:
        packed: `[T or more, (H + 2 J) D]` queries, keys, values.
        heads: H.
        kv_heads: J.
        query_norm: `[D]` weight of the norm of each query head; `[0]`: there is none.
        key_norm: as `query_norm`.
        epsilon: of the norms.
        cosines: `[positions, D]`
        sines: `[positions, D]`
        positions: `[T]`
        out: `[T or more, (H + J) D]` queries and keys.
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
    """Gradient of `rotate`, in place.

    `for_packed` `[T or more, (H + 2 J) D]` holds the gradient of `rotate`'s output in its first
    columns, and then that of its input. Gradients of the norms' weights are added.
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
