"""Keep the memory that tensors on a CPU free, for those that come next.

glibc gives large blocks back to the system when they are freed, and the next ones are pages that
the system has to clear: ten times the cost of the arithmetic for a tensor of 40 MiB. A training
step frees and allocates the same blocks over and over. So a trainer on a CPU keeps all that it once
had; its memory is that of its peak in any case.
"""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """From now on, in this process; whether the C library can do it (glibc can)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("freed memory goes back to the system: this C library has no mallopt")
        return False
    done = bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    logger.info("memory of freed tensors is kept")
    return done
