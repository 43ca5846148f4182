"""Memory of this machine, or of the container of a process. Light: no torch.

A control group may allow less than the machine has. Its usage includes the page cache, which the
kernel reclaims when memory is needed; after a checkpoint that is most of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Version(NamedTuple):
    limit: str
    used: str
    cached: str
    """Field of memory.stat: cached pages that were not used twice."""


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def host_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may use: the machine's, or its control group's limit if lower."""
    found = [_of_machine(root, "MemTotal:")]
    found += [_number(folder / version.limit) for folder, version in _groups(root)]
    return min((one for one in found if one is not None), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, if known. `root` as above."""
    found = [_of_machine(root, "MemAvailable:")]
    for folder, version in _groups(root):
        limit, used = (_number(folder / name) for name in (version.limit, version.used))
        if limit is not None and used is not None:
            found.append(limit - used + _cached(folder, version))
    return min((one for one in found if one is not None), default=None)


def _of_machine(root: Path, name: str) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith(name))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Folders of this process's control group and its ancestors."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            base, version = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        folder = Path(os.path.normpath(f"{base}/{path.lstrip('/')}"))
        # A name space may show a path that leads out of what is mounted here.
        inside = [one for one in (folder, *folder.parents) if one.is_relative_to(base)]
        yield from ((one, version) for one in inside or [base])


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max", or not readable for this process
        return None


def _cached(folder: Path, version: _Version) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[:1] == [version.cached])
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
