"""The lock of a run's folder: its controller holds it, and others look whether it is held.

The kernel releases the lock however its process ends. A file with a process id would not tell a
dead controller from another process that has its number.

    controller   exclusive, from its start to its end
    who looks    shared, for a moment: any number may look, and nothing is written
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

NAME = ".lock"
"""Of the file in the run's folder."""
_LOOKERS_SECONDS = 5.0
"""Longest wait for those who only look."""


def take(folder: Path) -> int | None:
    """Take the lock: a descriptor that holds it until closed, or None if another controller has it.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOOKERS_SECONDS
    try:
        while not _lock(descriptor, fcntl.LOCK_EX):
            if not _lock(descriptor, fcntl.LOCK_SH) or time.monotonic() > deadline:
                os.close(descriptor)
                return None
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(0.01)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(folder: Path) -> bool:
    """Whether a controller holds the lock. Changes nothing, and needs to read only.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
