"""Matrix products inside compiled kernels, by the BLAS library that torch brings along.

Its Fortran function `sgemm_` is called by its address, with the arguments that `torch.mm` would
give it, so the bits of the products and the number of threads are the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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
        pointers = [number.as_pointer(), real.as_pointer(), letter.as_pointer()]
        int_p, real_p, letter_p = pointers
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
