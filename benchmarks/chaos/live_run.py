"""A real run that is followed, killed and resumed from outside, as a user would."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.launch.identity import ProcessIdentity, send, with_variable
from asyncrl.launch.records import MARK_VARIABLE, ProcessRecord
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.runs.directory import read_state
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.weights.layout import SHARED_MEMORY
from benchmarks.harness import run_command

_POLL_SECONDS = 0.05
_LAST_LINE_BYTES = 1 << 18


class ChaosError(Exception):
    """A run did not do in time what was waited for. The message quotes the end of its output."""


@dataclass(frozen=True)
class Setup:
    """What all runs of a benchmark have in common."""

    config: Path
    """A configuration file of `asyncrl run`."""
    folder: Path
    """Of the run folders."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE overrides."""
    timeout_seconds: float = 300.0
    """Longest wait for a start, a step or an end."""


@dataclass
class LiveRun:
    """One run: its controller, its folder, and what may remain of it."""

    setup: Setup
    name: str
    steps: int
    """Optimizer steps that it would do if it were left alone."""
    _process: subprocess.Popen[bytes] | None = None
    _sockets: set[Path] = field(default_factory=set)
    _controllers: set[int] = field(default_factory=set)
    _output_at_start: int = 0
    """Length of the log when the present controller was started."""

    @property
    def path(self) -> Path:
        return self.setup.folder / self.name

    @property
    def _log(self) -> Path:
        return self.setup.folder / f"{self.name}.log"

    @property
    def controller(self) -> int:
        return self._running().pid

    def start(self, *more: str) -> None:
        """Start the controller; `more` are further arguments, such as --resume."""
        settings = (
            f"run.name={self.name}",
            f"run.directory={self.setup.folder}",
            f"run.steps={self.steps}",
            *self.setup.settings,
        )
        with self._log.open("ab") as output:
            self._output_at_start = output.tell()
            self._process = self._begin(settings, more, output)
        self._controllers.add(self._process.pid)

    def _begin(
        self, settings: tuple[str, ...], more: tuple[str, ...], output: BinaryIO
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            run_command(self.setup.config, settings, *more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def note_sockets(self) -> None:
        """Remember the present controller's folder of sockets."""
        state = read_state(self.path)
        if state is not None and state.control_address:
            self._sockets.add(Path(state.control_address.removeprefix("ipc://")).parent)

    def kill(self) -> None:
        process = self._running()
        process.kill()
        process.wait()

    def exit_code(self) -> int | None:
        """Of the controller; None while it runs."""
        return self._running().poll()

    def wait_for_the_end(self, expected_error: str | None) -> None:
        """Wait until the controller has ended by itself, with 1 and these words."""
        before = self._output_at_start
        code = self._wait_for_exit()
        if expected_error is None:
            return
        said = " ".join(self._log.read_bytes()[before:].decode(errors="replace").split())
        if code != 1 or expected_error not in said:
            raise self.error(f"ended with exit code {code}, without {expected_error!r}")

    def end(self, *, in_order: bool = True) -> int:
        """End the run by SIGTERM if it is active, and return its exit code."""
        process = self._running()
        if process.poll() is None and in_order:
            process.send_signal(signal.SIGTERM)
        return self._wait_for_exit()

    def _wait_for_exit(self) -> int:
        try:
            return self._running().wait(self.setup.timeout_seconds)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise self.error("did not end") from error

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition while the run is active."""
        deadline = time.monotonic() + self.setup.timeout_seconds
        while not condition():
            if self.exit_code() is not None:
                raise self.error(f"ended with exit code {self.exit_code()} before {what}")
            if time.monotonic() > deadline:
                raise self.error(f"waited {self.setup.timeout_seconds:.0f} s for {what}")
            time.sleep(_POLL_SECONDS)

    def last_step_at(self) -> float:
        """Unix time of the last recorded step; 0 before the first."""
        return self._last().time

    def last_step(self) -> int:
        """The last recorded step; -1 before the first."""
        return self._last().step

    def _last(self) -> _Moment:
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _LAST_LINE_BYTES))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return _Moment(0.0, -1)
        # What follows the last newline is empty, or a line that is being written.
        if len(lines) < 2:
            return _Moment(0.0, -1)
        return msgspec.json.decode(lines[-2], type=_Moment)

    def records(self) -> list[StepMetrics]:
        return read_metrics(self.path / "metrics.jsonl")

    def children(self) -> list[ProcessRecord]:
        """The children of the present controller, in the order of their start."""
        try:
            records = read_jsonl(self.path / "processes.jsonl", ProcessRecord)
        except FileNotFoundError:
            return []
        return [record for record in records if record.mark == records[-1].mark]

    def descendants(self) -> list[ProcessIdentity]:
        """All living processes that the present controller's children have started, and these."""
        return list(with_variable(MARK_VARIABLE, {record.mark for record in self.children()}))

    def leftovers(self) -> dict[str, int]:
        """After the end: how many processes, folders of sockets and shared files remain."""
        files = [
            path
            for pid in self._controllers
            for path in SHARED_MEMORY.glob(f"asyncrl-{self.name}-{pid}-*")
        ]
        return {
            "processes": len(self.descendants()),
            "sockets": sum(folder.exists() for folder in self._sockets),
            "shared_memory": len(files),
        }

    def abandon(self) -> None:
        """Kill what still runs, after a failure."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for process in self.descendants():
            send(process, signal.SIGKILL)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ChaosError(f"{self.name} was not started")
        return self._process

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def error(self, what: str) -> ChaosError:
        """An error about this run that quotes the end of its output."""
        lines = self.output().splitlines()[-15:]
        return ChaosError(f"{self.name} {what}. The end of its output:\n" + "\n".join(lines))


class _Moment(msgspec.Struct):
    """The fields of a step's record that are read often."""

    time: float
    step: int


def carry_out(setup: Setup, name: str, steps: int) -> LiveRun:
    """A run that is left alone, from its start to its end. Raises ChaosError."""
    run = LiveRun(setup, name, steps)
    run.start()
    code = run.end(in_order=False)
    if code:
        raise run.error(f"ended with exit code {code}")
    return run
