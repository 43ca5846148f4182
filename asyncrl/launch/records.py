"""Records the processes that a run starts, so that a later controller can end leftovers.

If a controller is killed, the kernel sends SIGTERM to its children. Processes that were stopped at
the time, and those started by user code, can remain. So each child is recorded in
RUN/processes.jsonl as soon as it is started, and the environment of all its processes has a random
mark of the controller. A controller that resumes the run ends

- every recorded child that is still the same process, by process id and start time,
- all processes in the session of such a child,
- all processes with a recorded mark in their environment.

Other processes are never touched, whatever their ids.
"""

import secrets
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.launch import identity
from asyncrl.launch.identity import ProcessIdentity, send, with_variable
from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl

MARK_VARIABLE = "ASYNCRL_CONTROLLER_MARK"
"""The environment variable that every process of a run inherits."""
TERM_SECONDS = 5.0
"""Time for leftover processes to end after SIGTERM, before they are killed."""
KILL_SECONDS = 10.0

_POLL_SECONDS = 0.02
_FILE = "processes.jsonl"


class ProcessRecord(msgspec.Struct, frozen=True):
    """A line of processes.jsonl: one child of a controller."""

    name: str
    process: ProcessIdentity
    """The process, which leads a session of the same number."""
    mark: str


class ProcessRecords:
    """Records the children of one controller."""

    def __init__(self, run: Path) -> None:
        self.mark = secrets.token_hex(16)
        """The value of `MARK_VARIABLE` for all processes of this controller."""
        self._path = run / _FILE

    def add(self, name: str, pid: int) -> None:
        """Record a child that was just started; do nothing if it has already ended."""
        process = identity.identity_of(pid)
        if process is not None:
            with closing(RetryingJsonlWriter[ProcessRecord](self._path)) as writer:
                writer.append(ProcessRecord(name, process, self.mark))

    def kill_all(self) -> None:
        """Send SIGKILL to every process with this controller's mark; do not wait."""
        for process in with_variable(MARK_VARIABLE, {self.mark}):
            send(process, signal.SIGKILL)

    def end_all(self) -> list[ProcessIdentity]:
        """Kill this controller's processes; return those that were left. Raises AsyncrlError."""
        left = list(with_variable(MARK_VARIABLE, {self.mark}))
        _end(lambda: with_variable(MARK_VARIABLE, {self.mark}), gently=False)
        return left


def end_leftovers(run: Path, say: Callable[[str], None]) -> None:
    """End processes of a run's dead controllers, forget their records. Raises AsyncrlError."""
    path = run / _FILE
    try:
        records = read_jsonl(path, ProcessRecord)
    except FileNotFoundError:
        return
    except RecordError as error:
        say(f"processes that an earlier controller left behind cannot be looked for: {error}")
        return
    ours = identity.ancestors()
    names = {record.process.pid: record.name for record in records}

    def remaining() -> dict[int, ProcessIdentity]:
        known = [record.process for record in records if identity.is_running(record.process)]
        marked = with_variable(MARK_VARIABLE, {record.mark for record in records})
        found = [*known, *identity.session_members({process.pid for process in known}), *marked]
        return {process.pid: process for process in found if process.pid not in ours}

    found = remaining()
    if found:
        listed = ", ".join(
            f"{names.get(pid, 'a process that it started')} (process {pid})" for pid in found
        )
        say(f"ending what an earlier controller of this run left behind: {listed}")
    _end(lambda: remaining().values(), gently=True)
    path.unlink()


def _end(remaining: Callable[[], Iterable[ProcessIdentity]], *, gently: bool) -> None:
    began = time.monotonic()
    if gently:
        for process in remaining():
            send(process, signal.SIGTERM)
            send(process, signal.SIGCONT)  # a stopped process acts on SIGTERM only then
        while list(remaining()) and time.monotonic() - began < TERM_SECONDS:
            time.sleep(_POLL_SECONDS)
    killed = time.monotonic()
    while left := list(remaining()):
        for process in left:
            send(process, signal.SIGKILL)
        if time.monotonic() - killed > KILL_SECONDS:
            listed = ", ".join(str(process.pid) for process in left)
            raise AsyncrlError(
                f"processes {listed} of this run did not end within {KILL_SECONDS:.0f} s after "
                "SIGKILL; they may be waiting for a disk or a device. End them, then start again"
            )
        time.sleep(_POLL_SECONDS)
