"""The least time of a decoding step on this machine, from its bytes and operations.

A step of n tokens reads every weight once and does 2 operations per weight and token:

    T(n) >= max(bytes / bandwidth, 2 * weights * n / arithmetic)

It is measured with torch's own kernels on the shapes of the widened layers: reading (a sum over
more memory than any cache holds), arithmetic (the product of two square matrices), and the layers'
three products with n columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

_STREAM = 1 << 27
"""How many float32 numbers are read: 512 MB."""
_SQUARE = 2048
"""Rows and columns of the square matrices."""
_ROWS = (1, 2, 8, 16, 32, 64, 128)


def measure(
    hidden: int, intermediate: int, layers: int, *, least: bool = False
) -> dict[str, float]:
    """Bandwidth, arithmetic and T(n) of a gated MLP, on the CPU in float32."""
    numbers, side, rows = (1 << 10, 16, (1, 2)) if least else (_STREAM, _SQUARE, _ROWS)
    weights = 3 * hidden * intermediate * layers
    found = {"weights": float(weights), "bytes_per_step": 4.0 * weights}
    stream = torch.ones(numbers)
    found["gigabytes_per_second"] = 4 * numbers / _seconds(stream.sum) / 1e9
    del stream
    square = torch.randn(side, side)
    found["gigaflops_per_second"] = 2 * side**3 / _seconds(lambda: square @ square) / 1e9
    gate, up = torch.randn(intermediate, hidden), torch.randn(intermediate, hidden)
    down = torch.randn(hidden, intermediate)
    for n in rows:
        tokens = torch.randn(n, hidden)

        def layer(tokens: torch.Tensor = tokens) -> torch.Tensor:
            inner = functional.silu(functional.linear(tokens, gate)) * functional.linear(tokens, up)
            return functional.linear(inner, down)

        found[f"products_of_{n}_tokens_ms"] = 1e3 * layers * _seconds(layer)
    found["floor_1_token_ms"] = found["bytes_per_step"] / found["gigabytes_per_second"] / 1e6
    found["floor_per_token_ms"] = 2 * weights / found["gigaflops_per_second"] / 1e6
    return found


@torch.inference_mode()
def _seconds(work: Callable[[], torch.Tensor], repeats: int = 9) -> float:
    """The shortest of some runs, which depends least on what else the machine is doing."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
