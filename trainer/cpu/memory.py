"""Keeps the memory of freed CPU tensors for the next ones.

glibc returns large freed blocks to the system, which clears the pages of the next ones: ten times
the cost of the arithmetic for a tensor of 40 MiB. A training step frees and allocates the same
blocks repeatedly, so a trainer on a CPU keeps them; its peak memory is the same.
"""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Keep freed memory from now on; return True if the C library supports it (glibc does)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("freed memory goes back to the system: this C library has no mallopt")
        return False
    done = bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    logger.info("memory of freed tensors is kept")
    return done
