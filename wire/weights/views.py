"""Tensors over the bytes of published weights."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from wire.errors import WeightsReadError
from wire.weights.layout import HEADER_BYTES, TensorSpec


def tensor_view(memory: mmap.mmap, spec: TensorSpec) -> Tensor:
    """A tensor that shares its bytes with `memory`, which holds a whole weights file.

    The tensor keeps the mapping open.

    Raises:
        WeightsReadError: the data type is unknown, or the tensor does not lie in the file.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsReadError(f"tensor {spec.name}: unknown data type {spec.dtype!r}")
    count, size = math.prod(spec.shape), len(memory)
    inside = spec.offset >= HEADER_BYTES and spec.offset + spec.nbytes <= size
    if not inside or min(spec.shape, default=0) < 0 or count * dtype.itemsize != spec.nbytes:
        raise WeightsReadError(
            f"tensor {spec.name}: {spec.shape} {spec.dtype} does not fill {spec.nbytes} bytes "
            f"at {spec.offset} of {size}"
        )
    if not count:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)
