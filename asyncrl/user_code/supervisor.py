"""The supervisor of a reward worker: a small process above it that outlives it.

    pool ── starts ──► supervisor ── forks ──► worker ── starts ──► what the user's functions start

It is forked before any of the user's code is loaded. It

- relays what the worker prints, at a limited rate, so that a function never waits for a full pipe;
- counts the processes that the worker has started and kills the worker if they are too many;
- kills all of them when the worker ends, when the pool asks (SIGTERM), or when the pool's process
  dies (SIGTERM too, by the kernel): by control group where that is allowed, and by a sweep over its
  own descendants, whose orphans it inherits as a subreaper;
- then says how the worker itself ended.

What a function leaves running after it has returned (a server that caches something) is kept until
the worker ends. Import-light: it is part of the worker's start.

A control group for one reward worker, where the system allows one (cgroup v2).

A control group holds every descendant of the worker whatever it does, and `cgroup.kill` ends all of
them at once. Making one needs write access below this process's own group: as root, in a systemd
unit with `Delegate=yes`, or in a container with a writable /sys/fs/cgroup. Elsewhere, and with
ASYNCRL_CONTROL_GROUPS=0 in the environment, the subreaper and the sweep of `process_tree` do the
same work. Import-light: a worker's supervisor loads this file.
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
"""Environment variable; "0": make no control groups."""
_PREFIX = "asyncrl-reward-"
_POLL_SECONDS = 0.005


class ControlGroup:
    """The control group of the worker whose supervisor has process id `owner`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, owner: int) -> ControlGroup | None:
        """The group of this supervisor; None if there is no cgroup v2 to use. Makes nothing."""
        own = None if os.environ.get(SWITCH) == "0" else _own_group()
        return None if own is None else cls(own / f"{_PREFIX}{owner}")

    def create(self, max_processes: int) -> bool:
        """Make the group; False where that is not allowed. Removes what dead owners have left."""
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
        """Move this process into the group; its children will be in it too."""
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.procs").write_text("0")

    def kill(self, seconds: float) -> None:
        """Kill every process of the group and remove it. Does nothing if there is no such group."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")
        while time.monotonic() < deadline:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # its processes are still ending
                time.sleep(_POLL_SECONDS)
            else:
                return


def _own_group() -> Path | None:
    """The folder of this process's cgroup v2; None if there is none."""
    with contextlib.suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        relative = next((line[3:] for line in groups if line.startswith("0::")), None)
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mount = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
        if relative is not None and mount is not None:
            return Path(mount + relative)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove empty groups whose supervisor has ended. Groups with processes cannot be removed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX)
        if not Path(f"/proc/{owner}").exists() or owner == str(os.getpid()):
            with contextlib.suppress(OSError):
                folder.rmdir()


BURST_BYTES = 64 * 1024
"""A worker may log this much at once."""
BYTES_PER_SECOND = 1024
"""And this much on average: 84 MiB a day."""
TAIL_BYTES = 4 * 1024
"""The end of the output that error messages quote from, whether or not it was logged."""


class OutputLimit:
    """Decides which part of a worker's output is logged, and keeps the end of all of it.

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
        """Bytes left out since the last sentence that said so."""
        self.tail = b""
        """The last `TAIL_BYTES` bytes."""

    def admit(self, chunk: bytes, now: float) -> bytes:
        """What of a chunk is to be logged; a sentence comes before it if bytes were left out."""
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
        """The sentence about what was left out since the last one; empty if nothing was."""
        left_out, self.left_out = self.left_out, 0
        if not left_out:
            return b""
        return (
            f"\n[asyncrl left out {left_out} bytes here: a reward worker may log "
            f"{BURST_BYTES // 1024} KiB at once and {BYTES_PER_SECOND // 1024} KiB a second]\n"
        ).encode()


LOOK_SECONDS = 0.2
"""Time between two counts of the processes below a worker."""
_HURRIED_SECONDS = 0.01
"""The same once there are many."""
KILL_SECONDS = 10.0
"""Longest time for killing everything below a worker."""
_CHUNK = 1 << 16
_LAST_CHUNKS = 64
"""Most chunks of output that are read once every process has ended."""


class Ending(msgspec.Struct, frozen=True):
    """How a worker ended, by its supervisor."""

    exit_code: int
    """Of the worker itself; negative: it was ended by this signal."""
    leftover: int = 0
    """Processes that it had started and that were killed after it."""
    too_many: int = 0
    """If not 0, the worker was killed because it had started this many processes."""
    out_of_memory: bool = False
    """Whether the kernel killed a process of this machine for memory while the worker ran."""
    output: str = ""
    """The end of what it and the functions printed."""


def supervise(parent: int, status: int, max_processes: int) -> None:
    """Fork. Returns in the worker; the supervisor ends here, after the worker and all below it.

    Args:
        parent: process id of the pool's process.
        status: descriptor that the `Ending` is written to.
        max_processes: most processes that the worker and all that it has started may be.
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
    """Watches one worker to its end."""

    worker: int
    output: int
    """Where the worker's output is read."""
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
        self._relay_rest()
        ending = Ending(
            exit_code=self.exit_code,
            leftover=leftover,
            too_many=self.too_many,
            out_of_memory=out_of_memory_kills() > killed_before,
            output=self.limit.tail.decode(errors="replace"),
        )
        with contextlib.suppress(OSError):
            os.write(self.status, msgspec.msgpack.encode(ending))
        os._exit(0)

    def _watch(self) -> None:
        """Relay output until the worker has ended or has too many processes."""
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
        """Note the worker's exit code if it is among those that have ended."""
        for pid, wait_status in ended:
            if pid == self.worker:
                self.exit_code = os.waitstatus_to_exitcode(wait_status)
                return True
        return False

    def _kill_all(self) -> int:
        """Kill everything below; returns how many processes that were, the worker not counted."""
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
        """Pass on what is there now; False at the end of the output."""
        try:
            chunk = os.read(self.output, _CHUNK)
        except BlockingIOError:
            return True
        if chunk:
            self._log(self.limit.admit(chunk, time.monotonic()))
        return bool(chunk)

    def _relay_rest(self) -> None:
        for _ in range(_LAST_CHUNKS):
            if not select.select([self.output], [], [], 0)[0] or not self._relay():
                break
        self._log(self.limit.notice())

    def _log(self, text: bytes) -> None:
        """Write to the pool, which may be busy: what does not fit its pipe is left out."""
        while text:
            try:
                text = text[os.write(2, text) :]
            except BlockingIOError:
                self.limit.left_out += len(text)
                return
            except OSError:  # the pool is gone
                return
