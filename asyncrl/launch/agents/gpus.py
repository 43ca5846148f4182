"""Counts the GPUs that an agent's child would find."""

from __future__ import annotations

import os

from asyncrl.launch.gpus import find_gpus, torch_build
from asyncrl.launch.placement import VISIBLE, select_gpus


def count_gpus() -> int:
    """Count the GPUs that CUDA_VISIBLE_DEVICES leaves; 0 with a CPU build. Raises UserError."""
    if torch_build().cuda is None:
        return 0
    return len(select_gpus(find_gpus(), os.environ.get(VISIBLE), None))
