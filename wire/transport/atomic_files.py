"""Replaces a file so that it is complete after a crash, of the process or of the machine."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Yield a file for the new contents of `path`, renamed at the end of the block.

    Readers see either the old or the new contents, even after a loss of power. Its permissions are
    `mode`, or what the umask leaves. Raises OSError if it could not be written; the old contents
    are still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode or 0o666), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever the umask is
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_atomically(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace the contents of a file as `replacing` does. Raises OSError."""
    with replacing(path, mode=mode) as file:
        file.write(text.encode())


def sync(path: Path) -> None:
    """Flush the contents of a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
