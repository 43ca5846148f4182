"""Page-locked memory: a GPU copies to and from it directly, at the speed of the bus.

torch's allocator of pinned memory rounds up to a power of two, up to twice the weights, so existing
memory is registered instead, as vLLM does for its KV in host memory. Has no effect without CUDA,
and has not run on a GPU yet.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Pin:
    """Keeps the pages of a tensor in host memory locked, until `release`.

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
