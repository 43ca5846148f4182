"""How much memory a program holds, seen from outside. Import-light.

    private pages, swapped ones and huge ones     what /proc says of each process
    shared pages of files in its /tmp             likewise, once for each process that maps them
    pipes and socket pairs                        what each open one can hold at most

The filter of system calls refuses everything else that holds memory (`asyncrl.sandbox.seccomp`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

_COUNTED = ("RssAnon", "RssShmem", "VmSwap", "HugetlbPages")
_BUFFERS = {"pipe": 64 << 10, "socket": 320 << 10}
"""Most bytes that one holds: a pipe's 16 pages; a socket's send buffer of 208 KiB, which the last
message may pass by half of that."""


def held(below: Sequence[int], open_files: int) -> int:
    """Bytes that a program holds.

    Args:
        below: ids of its processes, after that of the first process of its namespace.
        open_files: most descriptors of a process, which are counted where they cannot be read.
    """
    buffers: dict[str, int] = {}
    total = 0
    own_filters = _filters(_status("/proc/self"))
    for pid in below:
        # Each thread is asked: the first one may have ended, and others may have descriptors
        # of their own.
        tasks = [f"/proc/{pid}/task/{thread}" for thread in _entries(f"/proc/{pid}/task") or []]
        seen = {task: _status(task) for task in tasks}
        total += max(map(_pages, seen.values()), default=0)
        for task, status in seen.items():
            if pid == below[0] or _filters(status) <= own_filters:
                continue  # not the program: it has the filter of system calls, to its end
            found = _buffers(f"{task}/fd")
            if found is not None:
                buffers |= found
            elif "VmSize" in _status(task):  # else it has ended
                buffers[str(pid)] = open_files * _BUFFERS["socket"]
    return total + sum(buffers.values())


def _status(task: str) -> dict[str, str]:
    """What /proc says of a process or thread; nothing if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"{task}/status").read_text().splitlines()
        return {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _pages(status: dict[str, str]) -> int:
    return sum(int(status[name].split()[0]) * 1024 for name in _COUNTED if name in status)


def _filters(status: dict[str, str]) -> int:
    return int(status.get("Seccomp_filters", 0))


def _buffers(folder: str) -> dict[str, int] | None:
    """Pipes and sockets by name, and what each can hold; None: it must not be looked at."""
    names = _entries(folder)
    if names is None:
        return None
    found: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(OSError):
            target = Path(folder, name).readlink().name
            kind = target.partition(":")[0]
            if kind in _BUFFERS:
                found[target] = _BUFFERS[kind]
    return found


def _entries(folder: str) -> list[str] | None:
    """Names in a folder of /proc, none if the process has ended; None: it must not be read."""
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except PermissionError:
        return None
    except OSError:
        return []
