"""Starts child processes on this machine, each with a log file."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.cores import HELPER_CORES, divide_machine, stay_on
from asyncrl.errors import UserError
from asyncrl.launch.child_spec import ChildKeys, ChildSpec
from asyncrl.launch.interface import ProcessHandle
from asyncrl.launch.placement import GpuPlan
from asyncrl.launch.records import ProcessRecords
from asyncrl.launch.start_order import child_environment, last_lines, open_log

CHILD_MODULE = "asyncrl.child"
"""The module of a child. Benchmarks replace it by an entry point that then calls this one."""


class LocalProcess:
    """A child that leads a session, so that it can be ended together with its children."""

    node = address = ""  # this machine
    lost_with_machine = False

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes], log: Path) -> None:
        self.spec = spec
        self._process = process
        self._log = log

    def exit_code(self) -> int | None:
        """None while the process runs; negative for a signal."""
        code = self._process.poll()
        if code is not None:
            # Its children (an engine core, reward workers) must not outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def cause(self) -> str:
        """Empty: the exit code says how it ended."""
        return ""

    def end(self, *, by_force: bool) -> None:
        """Send SIGTERM to the process, or SIGKILL to it and its children."""
        if self._process.returncode is not None:
            return  # its id may belong to another process by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if by_force:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.terminate()

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its log file."""
        return last_lines(self._log, lines) or "(its log is empty)"


class LocalLauncher:
    """Starts children with this interpreter, which share the cores evenly.

    `logs` is the folder of their log files, and each child is recorded in `records`. `pin_cores`
    keeps each process on separate cores (`asyncrl.cores`), this one from the start of its first
    child. Without `gpus`, each sees what this process sees. Raises UserError as `divide_machine`.
    """

    uses_relays = False

    def __init__(
        self,
        logs: Path,
        records: ProcessRecords,
        *,
        generators: int,
        ranks: int = 1,
        threads: int | None = None,
        pin_cores: bool = False,
        gpus: GpuPlan | None = None,
    ) -> None:
        self._logs = logs
        self._records = records
        self._gpus = gpus
        self.threads, self._plan = divide_machine(
            generators=generators, threads=threads, pin_cores=pin_cores, ranks=ranks
        )

    @property
    def shares_processors(self) -> bool:
        """True if the trainer and a generator compute on the same GPU, or on the same cores."""
        gpus = self._gpus
        if gpus is not None and (gpus.trainer or gpus.generators[0]):
            return gpus.shares
        return self._plan is None

    async def make_room(self, generators: Sequence[int]) -> None:
        """Take spare GPUs. Raises UserError if there are too few, or no core is left."""
        count = max(generators) + 1
        if self._plan is not None and count > len(self._plan.generators):
            raise UserError(
                f"generator-{count - 1} needs separate cores (launcher.pin_cores), and all belong "
                f"to {len(self._plan.generators)} generator(s), the trainer and the reward "
                "workers; start the run with launcher.generators as high as it may become"
            )
        if self._gpus is not None:
            self._gpus = self._gpus.with_generators(count)

    def give_room_back(self, _generator: int) -> None:
        """Do nothing: its cores and GPUs stay reserved for the next one of its index."""

    def start(self, spec: ChildSpec, keys: ChildKeys, _node: str | None = None) -> ProcessHandle:
        """Start `python -m CHILD_MODULE`; its output goes to LOGS/NAME.log."""
        log = self._logs / f"{spec.name}.log"
        environment = os.environ | child_environment(spec.threads, self._records.mark)
        if self._gpus is not None:
            environment |= self._gpus.environment(spec.name)
        if self._plan is not None:
            stay_on(self._plan.helpers)
            environment[HELPER_CORES] = ",".join(map(str, self._plan.helpers))
        with open_log(log) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD_MODULE, msgspec.json.encode(spec).decode()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        assert process.stdin is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended already
            process.stdin.write(msgspec.msgpack.encode(keys))  # they fit into a pipe's buffer
        self._records.add(spec.name, process.pid)
        if self._plan is not None:
            # The interpreter is still loading in its only thread; later threads inherit this.
            with contextlib.suppress(OSError):  # it has already ended
                stay_on(self._plan.of(spec.name), process.pid)
        return LocalProcess(spec, process, log)
