"""Compiled kernels of `engine.torch.cpu.fused_model`: matrix products, and what is between them.

Products are computed by the BLAS library that torch brings along. Its Fortran function `sgemm_` is
called by its address, with the arguments that `torch.mm` would give it, so the bits of the products
and the number of threads are the same.

Shapes: T packed tokens, C hidden size, H query heads, J key/value heads, D head size, S slots. All
numbers are float32.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from asyncrl.rollout.cpu import LongArray, exp, inverse_size
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("engine/torch", "rollout")


@cache
def sgemm_address() -> int | None:
    """Return the address of torch's `sgemm_`; None if its library does not export it."""
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted(folder.glob("libtorch_cpu.*")):
        try:
            function = ctypes.CDLL(str(library)).sgemm_
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


@intrinsic
def _sgemm(
    _typing: Any, _at: Any, _m: Any, _n: Any, _k: Any, _a: Any, _b: Any, _beta: Any, _c: Any
) -> tuple[Any, Any]:
    """Compute row-major C `[n, m]` = A `[m, k]` times B `[n, k]`, plus `beta` times C."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        where, m, n, k, a, b, beta, c = args
        number, real, letter = ir.IntType(32), ir.FloatType(), ir.IntType(8)
        int_p, real_p, letter_p = (one.as_pointer() for one in (number, real, letter))
        signature = [letter_p] * 2 + [int_p] * 3 + [real_p] * 2 + [int_p, real_p, int_p]
        signature += [real_p] * 2 + [int_p]
        function = ir.FunctionType(ir.VoidType(), signature)

        def stored(value: Any) -> Any:
            return cgutils.alloca_once_value(builder, value)

        def matrix(value: Any) -> Any:
            return builder.inttoptr(value, real_p)

        rows, columns, inner = stored(m), stored(n), stored(k)
        turned, plain = (stored(ir.Constant(letter, ord(one))) for one in "TN")
        one, factor = stored(ir.Constant(real, 1.0)), stored(beta)
        builder.call(
            builder.inttoptr(where, function.as_pointer()),
            [
                *(turned, plain, rows, columns, inner, one),
                *(matrix(a), inner, matrix(b), inner, factor, matrix(c), rows),
            ],
        )
        return _context.get_dummy_value()

    long, number = types.intp, types.int32
    signature = types.void(long, number, number, number, long, long, types.float32, long)
    return signature, generate


@kernel.of_vectors
def multiply(
    sgemm: int, x: FloatArray, weight: FloatArray, bias: FloatArray, out: FloatArray
) -> None:
    """Apply a linear layer: `x` `[T, C]` times the transposed `weight` `[N, C]`, to `out` `[T, N]`.

    All arrays have rows without gaps. `bias` is `[N]`, or `[0]` for none.
    """
    rows, width = out.shape
    beta = 0.0
    if len(bias):
        beta = 1.0
        for t in range(rows):
            for c in range(width):
                out[t, c] = bias[c]
    if rows:
        _sgemm(
            sgemm, width, rows, x.shape[1], weight.ctypes.data, x.ctypes.data, beta, out.ctypes.data
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
