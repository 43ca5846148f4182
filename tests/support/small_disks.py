"""Real file systems of a few hundred kilobytes, to fill and to make read-only."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs. Root's processes meet its limits as everybody's do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, *, leave: int) -> None:
        """Write a file until about this many bytes are free."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        size = self._filler.stat().st_size
        with self._filler.open("r+b") as file:
            file.truncate(max(0, size - leave))

    def free(self) -> None:
        """Remove what `fill` wrote."""
        self._filler.unlink()

    def remount(self, *options: str) -> None:
        """Mount it again with other options, for instance "ro"."""
        subprocess.run(["mount", "-o", ",".join(("remount", *options)), self.path], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a file system of this size ("600k", "8m") at `path`; skips where that is forbidden."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "asyncrl-test", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
