"""Compiled kernels of `engine.torch.fused`: what lies between two matrix products.

Shapes: T packed tokens, C hidden size, H query heads, J key/value heads, D head size, S slots.
All numbers are float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.torch.jit import kernel
from rollout.trajectory import FloatArray

LongArray = NDArray[np.int64]

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = (
    np.float32(8.3334519073e-3),
    np.float32(1.3981999507e-3),
    np.float32(1.9875691500e-4),
)


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
        inverse = _inverse_size(states[t], epsilon)
        for c in range(states.shape[1]):
            out[t, c] = states[t, c] * inverse * weight[c]


@kernel.of_vectors
def add_and_norm(
    states: FloatArray, change: FloatArray, weight: FloatArray, epsilon: np.float32
) -> None:
    """Add `change` `[T or more, C]` to `states` `[T, C]`; it becomes the RMS norm of the sum."""
    for t in range(len(states)):
        for c in range(states.shape[1]):
            states[t, c] += change[t, c]
        inverse = _inverse_size(states[t], epsilon)
        for c in range(states.shape[1]):
            change[t, c] = states[t, c] * inverse * weight[c]


@kernel.of_vectors
def gated(both: FloatArray, out: FloatArray) -> None:
    """SwiGLU: silu of the first half of `[T, 2 I]` times the second half, into `[T, I]`."""
    width = out.shape[1]
    for t in range(len(out)):
        gate, up, row = both[t, :width], both[t, width:], out[t]
        for i in range(width):
            row[i] = gate[i] / (_ONE + _exp(-gate[i])) * up[i]


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

    Args:
        packed: `[T or more, (H + 2 J) D]` queries, keys, values; queries are changed in place.
        heads: H.
        query_norm: `[D]` weight of the norm of each query head; `[0]`: there is none.
        key_norm: as `query_norm`.
        epsilon: of the norms.
        cosines: `[positions, D]`
        sines: `[positions, D]`
        positions: `[T]`
        slots: `[T]`
        places: `[T]`
        keys: `[S, J, L, D]`
        values: `[S, J, L, D]`
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
    packed: FloatArray,
    t: int,
    start: int,
    weight: FloatArray,
    epsilon: np.float32,
    out: FloatArray,
) -> None:
    """RMS norm of one head, which begins at `start` of row `t`; without a weight a copy."""
    size = len(out)
    for d in range(size):
        out[d] = packed[t, start + d]
    if len(weight):
        inverse = _inverse_size(out, epsilon)
        for d in range(size):
            out[d] *= inverse * weight[d]


@kernel.of_vectors
def _rotated(
    x: FloatArray, cosines: FloatArray, sines: FloatArray, at: int, out: FloatArray
) -> None:
    """Rotary position embedding of one head (arXiv 2104.09864), halves as in transformers."""
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
    """Softmax attention of some queries, one after the other.

    Args:
        packed: `[T or more, (H + 2 J) D]` queries first.
        heads: H.
        chosen: `[N]` the tokens that attend.
        keys: `[S, J, L, D]`
        values: `[S, J, L, D]`
        slot: `[T]`; see `Reach`, also for the next four.
        first: `[T]`
        last: `[T]`
        base: `[T]`
        hidden: `[T, Q]`
        scale: of the scores.
        out: `[N or more, H D]`
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
    """The mean of `values[row, j, begin:begin + length]`, weighted by the softmax of `scores`."""
    size = len(out)
    top = np.float32(-np.inf)
    for i in range(length):
        top = max(top, scores[i])
    for i in range(length):
        scores[i] = _exp(scores[i] - top)
    total = np.float32(0)
    out[:] = 0
    for i in range(length):  # in order: hidden keys add exactly 0
        mass = scores[i]
        total += mass
        for d in range(size):
            out[d] += mass * values[row, j, begin + i, d]
    for d in range(size):
        out[d] /= total


@kernel.of_vectors
def _inverse_size(states: FloatArray, epsilon: np.float32) -> np.float32:
    """The factor of an RMS norm (arXiv 1910.07467, eq. 4) of one vector."""
    squares = np.float32(0)
    for c in range(len(states)):
        squares += states[c] * states[c]
    return np.float32(_ONE / np.sqrt(squares / np.float32(len(states)) + epsilon))


@kernel.of_vectors
def _exp(x: np.float32) -> np.float32:
    """e^x within 2 units in the last place, 0 below -87; a loop of it becomes vectors.

    Cephes' expf: 2^n times a polynomial on half a binade.
    """
    bounded = max(_LEAST, x)
    bounded = min(_MOST, bounded)
    n = np.floor(bounded * _LOG2_E + _HALF)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r * r + r + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x >= _LEAST else np.float32(0)
