"""Identifies processes by id, start time and boot.

The kernel reuses process ids. A process id together with a start time belongs to one process only,
so a recorded process can be found again, and another one is never taken for it.

All functions read /proc. Without it (macOS), processes are not found. `psutil` is unsuitable: its
start times move with the clock, so a record could not be compared with them later, and it signals a
process id after checking it, when the id may belong to another process.
"""

import contextlib
import functools
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

_PROC = Path("/proc")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one boot of this machine."""

    pid: int
    started: int
    """Clock ticks from boot to its start: field 22 of /proc/PID/stat."""
    boot: str
    """The kernel's random id of the boot."""


class ProcessStatus(NamedTuple):
    """The content of /proc/PID/stat."""

    state: str
    """R running, S sleeping, D in an uninterruptible wait, T stopped, Z ended and not reaped."""
    parent: int
    session: int
    """Process id of the leader of its session, which may have ended."""
    started: int

    @property
    def is_stopped(self) -> bool:
        """True if it was suspended, by SIGSTOP, Ctrl-Z or a debugger."""
        return self.state in "Tt"


def identity_of(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has this id now, or None."""
    status, boot = status_of(pid), _boot_id()
    if status is None or boot is None:
        return None
    return ProcessIdentity(pid, status.started, boot)


def status_of(pid: int) -> ProcessStatus | None:
    """Return the status of the process that has this id now, or None."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may contain anything; plain fields follow the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return ProcessStatus(
        state=fields[0], parent=int(fields[1]), session=int(fields[3]), started=int(fields[19])
    )


def ancestors() -> set[int]:
    """Return the process ids of this process and its ancestors."""
    found, pid = set(), os.getpid()
    while pid > 1 and pid not in found:
        found.add(pid)
        status = status_of(pid)
        pid = 0 if status is None else status.parent
    return found


def is_running(process: ProcessIdentity) -> bool:
    """Return True if this very process exists and has not ended."""
    status = status_of(process.pid)
    if status is None or status.state in "ZX":
        return False
    return (status.started, _boot_id()) == (process.started, process.boot)


def send(process: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to this very process; do nothing if it has ended or is another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The descriptor stays with the process, so its id cannot be reused after this check.
            if is_running(process):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def pidfd_of(pid: int) -> int | None:
    """Return a descriptor that is readable once this process has ended; None if it has."""
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def session_members(leaders: set[int]) -> Iterator[ProcessIdentity]:
    """Yield the processes in the sessions of these leaders."""
    for process in _running(_PROC.glob("[0-9]*")):
        status = status_of(process.pid)
        if status is not None and status.session in leaders:
            yield process


def with_variable(name: str, values: set[str]) -> Iterator[ProcessIdentity]:
    """Yield the processes started with one of these values of an environment variable."""
    wanted = {f"{name}={value}".encode() for value in values}

    def has_one(folder: Path) -> bool:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            return not wanted.isdisjoint((folder / "environ").read_bytes().split(b"\0"))
        return False

    # An environment is faster to read than an identity, and must be that of the identity.
    likely = filter(has_one, _PROC.glob("[0-9]*"))
    return (process for process in _running(likely) if has_one(_PROC / str(process.pid)))


def _running(folders: Iterable[Path]) -> Iterator[ProcessIdentity]:
    for path in folders:
        process = identity_of(int(path.name))
        if process is not None and process.pid != os.getpid() and is_running(process):
            yield process


@functools.cache
def _boot_id() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
