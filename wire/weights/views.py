"""Tensors over the bytes of published weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.layout import HEADER_BYTES, TensorSpec


def dtype_of(spec: TensorSpec, size: int) -> torch.dtype:
    """Return a tensor's data type; WeightsReadError unless it lies in a file of `size` bytes."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsReadError(f"tensor {spec.name}: unknown data type {spec.dtype!r}")
    inside = spec.offset >= HEADER_BYTES and spec.offset + spec.nbytes <= size
    whole = math.prod(spec.shape) * dtype.itemsize == spec.nbytes
    if not inside or min(spec.shape, default=0) < 0 or not whole:
        raise WeightsReadError(
            f"tensor {spec.name}: {spec.shape} {spec.dtype} does not fill {spec.nbytes} bytes "
            f"at {spec.offset} of {size}"
        )
    return dtype


def tensor_view(memory: Tensor, spec: TensorSpec) -> Tensor:
    """Return a tensor that shares its bytes with `memory`, `[nbytes]` uint8, as `dtype_of`."""
    dtype = dtype_of(spec, len(memory))
    return memory[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)
