"""Turns disk errors into CheckpointUnwritable."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.wire.messages.from_trainer import CheckpointFault

_CAUSES: dict[int, CheckpointFault] = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "quota",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError (no space) if fewer than `needed` bytes are free in the folder."""
    free = _free(folder)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def unwritable(directory: Path, needed: int) -> Iterator[None]:
    """Turn disk errors in the block into CheckpointUnwritable; `needed` is the size in bytes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        text = os.strerror(number) if number else str(error)
        free = _free(directory.parent)
        raise CheckpointUnwritable(
            f"the checkpoint {directory} cannot be written: {text} ({needed} bytes needed, "
            f"{'unknown' if free is None else free} free)",
            _CAUSES.get(number, "io_error"),
        ) from error


def _number(error: OSError | SafetensorError) -> int:
    """Return the error number, or 0. Safetensors has it only in its message."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = _RUST_ERRNO.search(str(error))
    return int(found[1]) if found else 0


def _free(folder: Path) -> int | None:
    """Bytes that this process may still write to the folder's disk, if known."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
