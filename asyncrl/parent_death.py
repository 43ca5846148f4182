"""A process that ends with the process that started it. Import-light."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; exit if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)
