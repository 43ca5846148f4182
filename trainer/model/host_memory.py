"""Memory of this machine, or of the container of a process. Light: no torch.

A control group may allow less than the machine has. Its usage includes the page cache, which the
kernel reclaims when memory is needed; after a checkpoint that is most of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Constants of glibc's malloc.h."""
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Keep the memory of freed CPU tensors; return True if the C library supports it (glibc does).

    glibc returns large freed blocks to the system, which clears the pages of the next ones: ten
    times the cost of the arithmetic for a tensor of 40 MiB. A training step frees and allocates the
    same blocks repeatedly; its peak memory is the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("memory of freed tensors is not kept: this C library has no mallopt")
        return False
    done = bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    logger.info("memory of freed tensors is kept")
    return done


class _Version(NamedTuple):
    limit: str
    used: str
    cached: str
    """Field of memory.stat: cached pages that were not used twice."""


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def host_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may use: the machine's, or its control group's limit if lower."""
    found = [_bytes_of(root / "proc/meminfo", "MemTotal:", 1024)]
    found += [_number(folder / version.limit) for folder, version in _groups(root)]
    return min((one for one in found if one is not None), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, if known. `root` as above."""
    found = [_bytes_of(root / "proc/meminfo", "MemAvailable:", 1024)]
    for folder, version in _groups(root):
        limit, used = (_number(folder / name) for name in (version.limit, version.used))
        if limit is not None and used is not None:
            cached = _bytes_of(folder / "memory.stat", version.cached) or 0
            found.append(limit - used + cached)
    return min((one for one in found if one is not None), default=None)


def _bytes_of(path: Path, name: str, unit: int = 1) -> int | None:
    """Return the number after a name at the beginning of a line, in bytes."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
        return next(int(words[1]) * unit for words in lines if words[:1] == [name])
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
