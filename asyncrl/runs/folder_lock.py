"""The lock of a run's folder: its controller holds it, and other processes check it.

The kernel releases the lock however its process ends. A file with a process id would not
distinguish a dead controller from another process with the same number.

    controller   exclusive, from its start to its end
    who looks    shared, for a moment: any number may look, and nothing is written
"""

import fcntl
import os
import time
from pathlib import Path

NAME = ".lock"
_LOOKERS_SECONDS = 5.0


class UnlockableError(OSError):
    """The file system does not support locks; the text names the folder and the remedy."""

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(error.errno, error.strerror, str(folder / NAME))
        self._folder = folder

    def __str__(self) -> str:
        return (
            f"the run's folder {self._folder} cannot be locked: {self.strerror}. Its file system "
            "must have locks (flock): mount NFS with its lock service or with the option "
            "local_lock=flock, or choose a folder on another disk (--set run.directory=FOLDER)"
        )


def take(folder: Path) -> int | None:
    """Take the lock; return a descriptor that holds it, or None if another controller has it.

    Raises UnlockableError if the file system lacks locks, OSError if the file cannot be opened.
    """
    was_there = (folder / NAME).exists()
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOOKERS_SECONDS
    try:
        while not _lock(folder, descriptor, fcntl.LOCK_EX):
            if not _lock(folder, descriptor, fcntl.LOCK_SH) or time.monotonic() > deadline:
                os.close(descriptor)
                return None
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(0.01)
    except UnlockableError:
        os.close(descriptor)
        if not was_there:
            (folder / NAME).unlink(missing_ok=True)
        raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(folder: Path) -> bool:
    """Return True if a controller holds the lock; read-only. Raises UnlockableError, OSError."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(folder, descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UnlockableError(folder, error) from error
    return True
