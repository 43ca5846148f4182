"""Tensors over the bytes of published weights, and pages locked for a GPU.

A GPU copies to and from page-locked memory directly, at the speed of the bus. torch's allocator of
pinned memory rounds up to a power of two, up to twice the weights, so existing memory is registered
instead, as vLLM does for its KV in host memory. That has not run on a GPU yet.
"""

import logging
import math

import torch
from torch import Tensor

from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.layout import HEADER_BYTES, TensorSpec

logger = logging.getLogger(__name__)


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


class Pin:
    """Locks the pages of a tensor in host memory until `release`; no effect without CUDA.

    A driver that refuses costs only speed: it is logged. The memory must outlive the pin.
    """

    def __init__(self, memory: Tensor) -> None:
        self._address: int | None = None
        if not torch.cuda.is_available() or not memory.nbytes:
            return
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code):
            logger.warning(
                "%.1f GiB for weights could not be page-locked (CUDA error %d): copies between it "
                "and a GPU take several times as long; see `ulimit -l`",
                memory.nbytes / 2**30,
                int(code),
            )
            return
        self._address = memory.data_ptr()

    def release(self) -> None:
        """Unlock the pages; called before the memory is freed. Idempotent."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None
