"""The supervisor of a worker: a small process above it that outlives it.

    pool ── starts ──► supervisor ── forks ──► worker ── starts ──► processes of user functions

It forks the worker before any of the user's code is loaded. It

- relays the worker's output at a limited rate, so that a function never blocks on a full pipe;
- counts the worker's processes and kills the worker if there are too many;
- kills all of them when the worker ends, when the pool asks (SIGTERM), or when the pool's process
  dies (the kernel sends SIGTERM): by control group where that is allowed, and by a sweep over its
  descendants, whose orphans it inherits as a subreaper;
- reports how the worker itself ended.

Processes that a function leaves running (a server that caches something) run until the worker ends.

A control group (cgroup v2) holds every descendant of the worker whatever it does, and `cgroup.kill`
ends all of them at once. Making one needs write access below this process's group: as root, in a
systemd unit with `Delegate=yes`, or in a container with a writable /sys/fs/cgroup. Elsewhere, and
with ASYNCRL_CONTROL_GROUPS=0 in the environment, the subreaper and the sweep of `process_tree` do
the same work. Import-light: a worker's start includes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from asyncrl.user_code.process_tree import (
    become_subreaper,
    descendants,
    end_with_parent,
    kill_descendants,
    out_of_memory_kills,
    reap,
)

SWITCH = "ASYNCRL_CONTROL_GROUPS"
"""Environment variable; "0" disables control groups."""
_PREFIX = "asyncrl-reward-"
_POLL_SECONDS = 0.005


class ControlGroup:
    """The control group of the worker whose supervisor has process id `owner`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, owner: int) -> ControlGroup | None:
        """Return the group of this supervisor, not created; None without cgroup v2."""
        own = None if os.environ.get(SWITCH) == "0" else _own_group()
        return None if own is None else cls(own / f"{_PREFIX}{owner}")

    def create(self, max_processes: int) -> bool:
        """Create the group and remove those of dead owners; False where that is not allowed."""
        try:
            _remove_abandoned(self._folder.parent)
            self._folder.mkdir()
            if not (self._folder / "cgroup.kill").exists():  # Linux before 5.14
                self._folder.rmdir()
                return False
        except OSError:
            return False
        with contextlib.suppress(OSError):  # the pids controller is not always delegated
            # It counts threads too, and only has to hold until the supervisor looks.
            (self._folder / "pids.max").write_text(str(4 * max_processes + 1024))
        return True

    def join(self) -> None:
        """Move this process, and so its later children, into the group."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.procs").write_text("0")

    def kill(self, seconds: float) -> None:
        """Kill every process of the group and remove it. Does nothing if there is no such group."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")
        while self._folder.exists() and time.monotonic() < deadline:
            try:
                self._folder.rmdir()
            except OSError:  # its processes are still ending
                time.sleep(_POLL_SECONDS)


def _own_group() -> Path | None:
    """Return the folder of this process's cgroup v2; None if there is none."""
    with contextlib.suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        relative = next((line[3:] for line in groups if line.startswith("0::")), None)
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mount = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
        if relative is not None and mount is not None:
            return Path(mount + relative)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove empty groups whose supervisor has ended."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX)
        if not Path(f"/proc/{owner}").exists() or owner == str(os.getpid()):
            with contextlib.suppress(OSError):
                folder.rmdir()


BURST_BYTES = 64 * 1024
"""Output of a worker that is logged at once."""
BYTES_PER_SECOND = 1024
"""Output that is logged on average: 84 MiB a day."""
TAIL_BYTES = 4 * 1024
"""End of the output, logged or not, that error messages quote from."""


class OutputLimit:
    """Limits the logged part of a worker's output, and keeps the end of all of it.

    Example:
        >>> limit = OutputLimit(now=0.0)
        >>> limit.admit(b"x" * (BURST_BYTES + 10), now=0.0)[-1:]
        b'x'
        >>> limit.admit(b"more", now=0.0)
        b''
        >>> limit.admit(b"later", now=1.0).splitlines()[-1]
        b'later'
    """

    def __init__(self, now: float) -> None:
        self._budget = float(BURST_BYTES)
        self._now = now
        self.left_out = 0
        """Bytes left out since the last notice."""
        self.tail = b""

    def admit(self, chunk: bytes, now: float) -> bytes:
        """Return the part of a chunk to log, after a notice if bytes were left out before it."""
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        grown = self._budget + (now - self._now) * BYTES_PER_SECOND
        self._budget, self._now = min(float(BURST_BYTES), grown), now
        if self._budget <= 0 or (self.left_out and self._budget < min(len(chunk), TAIL_BYTES)):
            self.left_out += len(chunk)
            return b""
        notice = self.notice()
        shown = chunk[: max(0, int(self._budget))]
        self._budget -= len(shown)
        self.left_out += len(chunk) - len(shown)
        return notice + shown

    def notice(self) -> bytes:
        """Return a notice about bytes left out since the last one; empty if there were none."""
        left_out, self.left_out = self.left_out, 0
        if not left_out:
            return b""
        return (
            f"\n[asyncrl left out {left_out} bytes here: a reward worker may log "
            f"{BURST_BYTES // 1024} KiB at once and {BYTES_PER_SECOND // 1024} KiB a second]\n"
        ).encode()


LOOK_SECONDS = 0.2
"""Interval of counting the processes below a worker."""
_HURRIED_SECONDS = 0.01
"""The same if there are many."""
KILL_SECONDS = 10.0
"""Longest time for killing all processes below a worker."""
_CHUNK = 1 << 16
_LAST_CHUNKS = 64
"""Longest output, in chunks, that is read once every process has ended."""


class Ending(msgspec.Struct, frozen=True):
    """The supervisor's report of a worker's end."""

    exit_code: int
    """Exit code of the worker; negative for a signal."""
    leftover: int = 0
    """Processes that the worker had started and that were killed after it."""
    too_many: int = 0
    """Number of processes for which the worker was killed; 0 if it was not."""
    out_of_memory: bool = False
    """True if the kernel killed a process of this machine for memory while the worker ran."""
    output: str = ""


def supervise(parent: int, status: int, max_processes: int) -> None:
    """Fork, and return in the worker; the supervisor exits here, after all processes below it.

    `parent` is the process id of the pool's process, `status` the descriptor to write the `Ending`
    to, and `max_processes` the limit for the worker and all that it has started.
    """
    end_with_parent(parent, signal.SIGTERM)
    become_subreaper()
    read_end, write_end = os.pipe()
    group = ControlGroup.of(os.getpid())
    if group is not None and not group.create(max_processes):
        group = None
    me = os.getpid()
    signal.signal(signal.SIGTERM, _end)
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(me, signal.SIGKILL)
        os.setsid()  # a signal that a function sends to its own process group ends only the worker
        if group is not None:
            group.join()
        os.close(status)
        os.close(read_end)
        os.dup2(write_end, 2)
        os.close(write_end)
        return
    os.close(write_end)
    for standard in (0, 1):  # the pool must see the worker's end of these
        os.close(standard)
    _Supervisor(worker, read_end, status, group, max_processes).run()


class _Ended(BaseException):
    """The pool asked for the end, or its process died."""


def _end(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


@dataclass(slots=True)
class _Supervisor:
    worker: int
    output: int
    status: int
    group: ControlGroup | None
    max_processes: int
    exit_code: int = -signal.SIGKILL
    too_many: int = 0
    limit: OutputLimit = field(default_factory=lambda: OutputLimit(time.monotonic()))

    def run(self) -> None:
        """Watch, kill, report. Never returns."""
        killed_before = out_of_memory_kills()
        os.set_blocking(2, False)
        os.set_blocking(self.output, False)
        with contextlib.suppress(_Ended):
            self._watch()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        leftover = self._kill_all()
        for _ in range(_LAST_CHUNKS):
            if not select.select([self.output], [], [], 0)[0] or not self._relay():
                break
        self._log(self.limit.notice())
        out_of_memory = out_of_memory_kills() > killed_before
        output = self.limit.tail.decode(errors="replace")
        ending = Ending(self.exit_code, leftover, self.too_many, out_of_memory, output)
        with contextlib.suppress(OSError):
            os.write(self.status, msgspec.msgpack.encode(ending))
        os._exit(0)

    def _watch(self) -> None:
        waiting: list[int] = [self.output]
        pidfd = os.pidfd_open(self.worker) if sys.platform == "linux" else -1
        if pidfd >= 0:
            waiting.append(pidfd)
        pause, looked = LOOK_SECONDS, 0.0
        while not self._collect(reap()):
            ready, _, _ = select.select(waiting, [], [], pause)
            if self.output in ready and not self._relay():
                waiting.remove(self.output)  # every process below has closed it
            now = time.monotonic()
            if now - looked >= pause:
                looked = now
                processes = len(descendants(os.getpid()))
                if processes > self.max_processes:
                    self.too_many = processes
                    return
                pause = _HURRIED_SECONDS if processes > self.max_processes // 4 else LOOK_SECONDS

    def _collect(self, ended: list[tuple[int, int]]) -> bool:
        for pid, wait_status in ended:
            if pid == self.worker:
                self.exit_code = os.waitstatus_to_exitcode(wait_status)
                return True
        return False

    def _kill_all(self) -> int:
        """Kill everything below; return how many processes that were, without the worker."""
        with contextlib.suppress(PermissionError):  # only root may: for the race with a fork bomb
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        leftover = len(set(descendants(os.getpid())) - {self.worker})
        if self.group is not None:
            self.group.kill(KILL_SECONDS)
        if sys.platform != "linux":  # no sweep
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.worker, signal.SIGKILL)
        self._collect(kill_descendants(KILL_SECONDS))
        return leftover

    def _relay(self) -> bool:
        """Pass on the output that is there; False at its end."""
        try:
            chunk = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return True
        if chunk:
            self._log(self.limit.admit(chunk, time.monotonic()))
        return bool(chunk)

    def _log(self, text: bytes) -> None:
        """Write to the pool; if it is busy, output that does not fit the pipe is left out."""
        while text:
            try:
                text = text[os.write(2, text) :]
            except BlockingIOError:
                self.limit.left_out += len(text)
                return
            except OSError:  # the pool is gone
                return
