"""Finds and kills all processes that descend from one, however they were started.

A subreaper (`become_subreaper`) becomes the parent of orphans among its descendants, so a child
whose parent has exited stays below it, with or without `setsid`. Import-light: a worker's
supervisor loads this file.

`psutil.Process.children` would miss processes: it drops children that look older than their parent,
by times to which it adds the boot time, read anew for each process, and the kernel's boot time
moves by a second when the clock is corrected. It also reads all of /proc for each walk, where the
kernel lists children, and a sandbox walks every 20 ms.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, signal_number: int) -> None:
    """Send this process a signal when its parent ends; exit if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(1)


def end_process(status: int) -> NoReturn:
    """Exit as Python does, but keep imported modules: clearing torch takes 2 s of CPU."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


_PR_SET_CHILD_SUBREAPER = 36
_STOP_ROUNDS = 50
"""Longest sequence of walks over the tree until all of it is stopped."""
_PAUSE_SECONDS = 0.002


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants. Does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Return the process ids below `root`, parents before children; empty outside Linux."""
    children = _children if _KERNEL_LISTS_CHILDREN else _children_by_parent()
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children(parent)]
        found += level
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    # A process or a thread may end in between.
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_bytes().split())
    return children


def _children_by_parent() -> Callable[[int], list[int]]:
    """Return a lookup from a list of all processes, for kernels without CONFIG_PROC_CHILDREN."""
    by_parent: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    # The second field is the command in parentheses, which may contain anything.
                    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                    by_parent.setdefault(int(fields[1]), []).append(int(folder.name))
    return lambda pid: by_parent.get(pid, [])


_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def reap() -> list[tuple[int, int]]:
    """Collect this process's children that have ended: process ids and wait statuses."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(one)
    return ended


def kill_descendants(seconds: float) -> list[tuple[int, int]]:
    """Kill everything below this process, until nothing is left or the time is up.

    Each round stops all processes that it finds until a walk finds no new one, so that none forks
    between the walk and the kill. Returns as `reap`.
    """
    deadline = time.monotonic() + seconds
    ended: list[tuple[int, int]] = []
    me = os.getpid()
    while True:
        ended += reap()
        found = set(descendants(me))
        if not found or time.monotonic() > deadline:
            return ended
        stopped: set[int] = set()
        for _ in range(_STOP_ROUNDS):
            if found <= stopped:
                break
            for pid in found - stopped:
                _send(pid, signal.SIGSTOP)
            stopped |= found
            found = set(descendants(me))
        for pid in stopped | found:
            _send(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for memory on this machine; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
