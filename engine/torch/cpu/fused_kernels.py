"""Compiled kernels of `engine.torch.cpu.fused_model` between matrix products.

Shapes: T packed tokens, C hidden size, H query heads, J key/value heads, D head size, S slots. All
numbers are float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.cpu import LongArray, exp, inverse_size
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("engine/torch", "rollout")


@kernel.of_vectors
def embed(
    ids: LongArray,
    table: FloatArray,
    weight: FloatArray,
    epsilon: np.float32,
    states: FloatArray,
    out: FloatArray,
) -> None:
    """Look up `[T]` tokens: `states` `[T, C]`, and their RMS norm: `out` `[T or more, C]`."""
    for t in range(len(ids)):
        for c in range(states.shape[1]):
            states[t, c] = table[ids[t], c]
        inverse = inverse_size(states[t], epsilon)
        for c in range(states.shape[1]):
            out[t, c] = states[t, c] * inverse * weight[c]


@kernel.of_vectors
def add_and_norm(
    states: FloatArray, change: FloatArray, weight: FloatArray, epsilon: np.float32
) -> None:
    """Add `change` `[T or more, C]` to `states` `[T, C]`; set it to the RMS norm of the sum."""
    for t in range(len(states)):
        for c in range(states.shape[1]):
            states[t, c] += change[t, c]
        inverse = inverse_size(states[t], epsilon)
        for c in range(states.shape[1]):
            change[t, c] = states[t, c] * inverse * weight[c]


@kernel.of_vectors
def rotate_and_store(
    packed: FloatArray,
    heads: int,
    query_norm: FloatArray,
    key_norm: FloatArray,
    epsilon: np.float32,
    cosines: FloatArray,
    sines: FloatArray,
    positions: LongArray,
    slots: LongArray,
    places: LongArray,
    keys: FloatArray,
    values: FloatArray,
) -> None:
    """Norm and rotate queries and keys, and write keys and values to their places.

    `packed` `[T or more, (H + 2 J) D]` has queries, which are changed in place, keys and values.
    Norm weights are `[D]`, or `[0]` for none; `cosines` and `sines` `[positions, D]`; `positions`,
    `slots` and `places` `[T]`; `keys` and `values` `[S, J, L, D]`.
    """
    kv_heads, size = keys.shape[1], keys.shape[3]
    normed, rotated = np.empty(size, np.float32), np.empty(size, np.float32)
    for t in range(len(positions)):
        slot, place = slots[t], places[t]
        for head in range(heads):
            start = head * size
            _normed(packed, t, start, query_norm, epsilon, normed)
            _rotated(normed, cosines, sines, positions[t], rotated)
            for d in range(size):
                packed[t, start + d] = rotated[d]
        for head in range(kv_heads):
            start = (heads + head) * size
            _normed(packed, t, start, key_norm, epsilon, normed)
            _rotated(normed, cosines, sines, positions[t], rotated)
            for d in range(size):
                keys[slot, head, place, d] = rotated[d]
            start += kv_heads * size
            for d in range(size):
                values[slot, head, place, d] = packed[t, start + d]


@kernel.of_vectors
def _normed(
    packed: FloatArray, t: int, start: int, weight: FloatArray, epsilon: np.float32, out: FloatArray
) -> None:
    """Compute the RMS norm of one head, from `start` of row `t`; without a weight a copy."""
    size = len(out)
    for d in range(size):
        out[d] = packed[t, start + d]
    if len(weight):
        inverse = inverse_size(out, epsilon)
        for d in range(size):
            out[d] *= inverse * weight[d]


@kernel.of_vectors
def _rotated(
    x: FloatArray, cosines: FloatArray, sines: FloatArray, at: int, out: FloatArray
) -> None:
    """Apply rotary position embedding to one head (arXiv 2104.09864), halves as in transformers."""
    size = len(x)
    half = size // 2
    for d in range(half):
        out[d] = x[d] * cosines[at, d] - x[d + half] * sines[at, d]
    for d in range(half, size):
        out[d] = x[d] * cosines[at, d] + x[d - half] * sines[at, d]


@kernel.of_vectors
def attend(
    packed: FloatArray,
    heads: int,
    chosen: LongArray,
    keys: FloatArray,
    values: FloatArray,
    slot: LongArray,
    first: LongArray,
    last: LongArray,
    base: LongArray,
    hidden: NDArray[np.bool_],
    scale: np.float32,
    out: FloatArray,
) -> None:
    """Compute softmax attention of the `chosen` `[N]` queries, one after the other.

    `packed` is `[T or more, (H + 2 J) D]`, queries first; `keys` and `values` `[S, J, L, D]`;
    `slot` to `hidden` as in `AttendedKeys`; `out` `[N or more, H D]`.
    """
    kv_heads, size = keys.shape[1], keys.shape[3]
    group = heads // kv_heads
    scores, mean = np.empty(keys.shape[2], np.float32), np.empty(size, np.float32)
    query = np.empty(size, np.float32)
    for n in range(len(chosen)):
        t = chosen[n]
        row, begin, length = slot[t], first[t], last[t] + 1 - first[t]
        for head in range(heads):
            j = head // group
            for d in range(size):
                query[d] = packed[t, head * size + d] * scale
            for i in range(length):
                score = np.float32(0)
                for d in range(size):
                    score += query[d] * keys[row, j, begin + i, d]
                scores[i] = score
            for column in range(hidden.shape[1]):
                if hidden[t, column]:
                    scores[base[t] + column - begin] = -np.inf
            _weighted_mean(scores, length, values, row, j, begin, mean)
            for d in range(size):
                out[n, head * size + d] = mean[d]


@kernel.of_vectors
def _weighted_mean(
    scores: FloatArray,
    length: int,
    values: FloatArray,
    row: int,
    j: int,
    begin: int,
    out: FloatArray,
) -> None:
    """Average `values[row, j, begin:begin + length]`, weighted by the softmax of `scores`."""
    size = len(out)
    top = np.float32(-np.inf)
    for i in range(length):
        top = max(top, scores[i])
    for i in range(length):
        scores[i] = exp(scores[i] - top)
    total = np.float32(0)
    out[:] = 0
    for i in range(length):  # in order: hidden keys add exactly 0
        mass = scores[i]
        total += mass
        for d in range(size):
            out[d] += mass * values[row, j, begin + i, d]
    for d in range(size):
        out[d] /= total
