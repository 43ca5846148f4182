"""Arrays of the host on the trainer's device, without making the host wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(
    values: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of these values.

    A copy to a GPU from ordinary memory returns when everything before it has been computed. From
    pinned memory it is one more entry of the device's queue.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
