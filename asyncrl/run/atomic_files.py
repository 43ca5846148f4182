"""Replace a file so that it is whole after a crash, of the process or of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that readers see either the old or the new contents.

    The new contents are on the disk before the file takes its name, so that a machine that loses
    power never leaves an empty file.

    Raises:
        OSError: it could not be written; the old contents are still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
