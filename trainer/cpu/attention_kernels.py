"""Compiled kernels of causal attention in a packed row, forward and backward.

Each query attends to the tokens of its segment up to itself, and to `shared` tokens that begin at
the segment's `place` in the row. Keys and values of a segment are copied once, next to each other,
so that the loops of each query are whole vectors. Shapes as in `trainer.cpu.fused`; N segments.
"""

import numpy as np

from asyncrl.rollout.cpu import LongArray, exp
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("trainer/cpu", "rollout")


@kernel.of_vectors
def attend(
    rotated: FloatArray,
    packed: FloatArray,
    heads: int,
    kv_heads: int,
    starts: LongArray,
    ends: LongArray,
    places: LongArray,
    shared: LongArray,
    scale: np.float32,
    log_sums: FloatArray,
    out: FloatArray,
) -> None:
    """Causal softmax attention within segments.

    `rotated` `[T or more, (H + J) D]` are queries and keys of H `heads` and J `kv_heads`; `packed`
    `[T or more, (H + 2 J) D]` has the values last. Each of N segments has its first token in
    `starts`, one after its last in `ends`, and also attends to `shared` tokens from `places` on.
    `scale` is that of the scores. Fills `out` `[T or more, H D]`, and `[T, H]` softmax `log_sums`.
    """
    size = rotated.shape[1] // (heads + kv_heads)
    group = heads // kv_heads
    longest = _longest(starts, ends, shared)
    scores, query = np.empty(longest, np.float32), np.empty(size, np.float32)
    mean = np.empty(size, np.float32)
    keys, values = np.zeros((size, longest), np.float32), np.empty((longest, size), np.float32)
    for n in range(len(starts)):
        skipped = starts[n] - shared[n]
        for j in range(kv_heads):
            column = (heads + j) * size
            _copy_turned(rotated, column, places[n], shared[n], skipped, ends[n], keys)
            _copy(packed, column + kv_heads * size, places[n], shared[n], skipped, ends[n], values)
            for t in range(starts[n], ends[n]):
                length = t + 1 - skipped
                whole = _whole_vectors(length)
                for head in range(j * group, (j + 1) * group):
                    start = head * size
                    for d in range(size):
                        query[d] = rotated[t, start + d] * scale
                    _products(query, keys, whole, scores)
                    top = scores[0]
                    for i in range(length):
                        top = max(top, scores[i])
                    for i in range(length, whole):
                        scores[i] = -np.inf
                    total = np.float32(0)
                    for i in range(whole):
                        scores[i] = exp(scores[i] - top)
                    for i in range(whole):
                        total += scores[i]
                    _mean(scores, values, length, mean)
                    for d in range(size):
                        out[t, start + d] = mean[d] / total
                    log_sums[t, head] = top + np.log(total)


@kernel.of_vectors
def _longest(starts: LongArray, ends: LongArray, shared: LongArray) -> int:
    longest = 0
    for n in range(len(starts)):
        longest = max(longest, ends[n] - starts[n] + shared[n])
    return _whole_vectors(longest)


@kernel.of_vectors
def _whole_vectors(length: int) -> int:
    """Round up to 32: a vector loop takes 32 numbers at once, and the rest one by one."""
    return (length + 31) // 32 * 32


@kernel.of_vectors
def _copy(
    table: FloatArray, column: int, place: int, shared: int, skipped: int, end: int, out: FloatArray
) -> None:
    """Copy the rows of a segment and what it shares, from a column on: `[length, D]`."""
    for i in range(end - skipped):
        row = table[place + i if i < shared else i + skipped, column : column + out.shape[1]]
        copy = out[i]
        for d in range(len(row)):
            copy[d] = row[d]


@kernel.of_vectors
def _copy_turned(
    table: FloatArray, column: int, place: int, shared: int, skipped: int, end: int, out: FloatArray
) -> None:
    """Copy like `_copy`, but transposed: `[D, length]`."""
    for i in range(end - skipped):
        row = table[place + i if i < shared else i + skipped, column : column + len(out)]
        for d in range(len(row)):
            out[d, i] = row[d]


@kernel.of_vectors
def _products(vector: FloatArray, turned: FloatArray, length: int, out: FloatArray) -> None:
    """Multiply `[D]` with the first columns of `[D, length]`; D is a multiple of 4."""
    for i in range(length):
        out[i] = 0
    for d in range(0, len(vector), 4):
        a, b, c, e = vector[d], vector[d + 1], vector[d + 2], vector[d + 3]
        first, second, third, fourth = turned[d], turned[d + 1], turned[d + 2], turned[d + 3]
        for i in range(length):
            out[i] += a * first[i] + b * second[i] + c * third[i] + e * fourth[i]


@kernel.of_vectors
def _mean(masses: FloatArray, rows: FloatArray, length: int, out: FloatArray) -> None:
    for d in range(len(out)):
        out[d] = 0
    for i in range(length):
        mass, row = masses[i], rows[i]
        for d in range(len(out)):
            out[d] += mass * row[d]


@kernel.of_vectors
def attend_backward(
    rotated: FloatArray,
    packed: FloatArray,
    heads: int,
    kv_heads: int,
    starts: LongArray,
    ends: LongArray,
    places: LongArray,
    shared: LongArray,
    scale: np.float32,
    log_sums: FloatArray,
    out: FloatArray,
    grad: FloatArray,
    for_packed: FloatArray,
) -> None:
    """Add the gradient of `attend`, given that of `out`, to `for_packed` (rotated q, k; v)."""
    size = rotated.shape[1] // (heads + kv_heads)
    group = heads // kv_heads
    longest = _longest(starts, ends, shared)
    scores, changes = np.empty(longest, np.float32), np.empty(longest, np.float32)
    query, above = np.empty(size, np.float32), np.empty(size, np.float32)
    for_query = np.empty(size, np.float32)
    keys, values = np.zeros((size, longest), np.float32), np.zeros((size, longest), np.float32)
    rows = np.empty((longest, size), np.float32)
    for_keys, for_values = np.empty_like(rows), np.empty_like(rows)
    for n in range(len(starts)):
        skipped = starts[n] - shared[n]
        for j in range(kv_heads):
            key, value = (heads + j) * size, (heads + kv_heads + j) * size
            _copy(rotated, key, places[n], shared[n], skipped, ends[n], rows)
            _copy_turned(rotated, key, places[n], shared[n], skipped, ends[n], keys)
            _copy_turned(packed, value, places[n], shared[n], skipped, ends[n], values)
            for_keys[: ends[n] - skipped] = 0
            for_values[: ends[n] - skipped] = 0
            for t in range(starts[n], ends[n]):
                length = t + 1 - skipped
                whole = _whole_vectors(length)
                for head in range(j * group, (j + 1) * group):
                    start = head * size
                    for d in range(size):
                        query[d] = rotated[t, start + d] * scale
                        above[d] = grad[t, start + d]
                    mean = np.float32(0)
                    for d in range(size):  # apart from stores: see `Compiler.of_sums`
                        mean += above[d] * out[t, start + d]
                    _products(query, keys, whole, scores)
                    _products(above, values, whole, changes)
                    log_sum = log_sums[t, head]
                    for i in range(length, whole):
                        scores[i] = -np.inf
                    for i in range(whole):
                        scores[i] = exp(scores[i] - log_sum)
                        changes[i] = scores[i] * (changes[i] - mean)
                    _mean(changes, rows, length, for_query)
                    _add_products(changes, query, length, for_keys)
                    _add_products(scores, above, length, for_values)
                    for d in range(size):
                        for_packed[t, start + d] += for_query[d] * scale
            _add_rows(for_keys, key, places[n], shared[n], skipped, ends[n], for_packed)
            _add_rows(for_values, value, places[n], shared[n], skipped, ends[n], for_packed)


@kernel.of_vectors
def _add_products(masses: FloatArray, vector: FloatArray, length: int, out: FloatArray) -> None:
    """Add to each of the first rows of `[length, D]` its mass times `[D]`."""
    for i in range(length):
        mass, row = masses[i], out[i]
        for d in range(len(vector)):
            row[d] += mass * vector[d]


@kernel.of_vectors
def _add_rows(
    rows: FloatArray, column: int, place: int, shared: int, skipped: int, end: int, out: FloatArray
) -> None:
    """Reverse `_copy`: add `[length, D]` to a segment's rows, from a column on."""
    for i in range(end - skipped):
        target = out[place + i if i < shared else i + skipped, column : column + rows.shape[1]]
        row = rows[i]
        for d in range(len(row)):
            target[d] += row[d]
