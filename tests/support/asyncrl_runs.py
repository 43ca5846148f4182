"""Run the real command line on the example of docs/your-own.md."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from asyncrl.cli.entry import main
from asyncrl.launch.identity import status_of
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.wire.records.step import RunResult, StepMetrics

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "your_own"
_PIPE = 1 << 20
"""Bytes of output that a run may print before it ends; 64 KiB are 150 steps."""
_UNHURRIED = Path(__file__).with_name("unhurried_rewards.py")
UNHURRIED = f"[{{name: '{_UNHURRIED}:digits_please'}}]"
"""`rewards.functions` of a run that leaves the cores to what the test waits for."""
UNHURRIED_DIGITS = f"[{{name: '{_UNHURRIED}:digits'}}]"
"""The same for other rows than those of `OWN`."""


@dataclass
class CommandLine:
    """`asyncrl run examples/your_own/run.yaml`, with its own run folder and model."""

    runs: Path
    model: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"own-{uuid.uuid4().hex[:6]}")
    """Of the run; files in memory bear it, also those of other workers' runs."""
    left_before: frozenset[Path] = field(
        default_factory=lambda: frozenset(Path("/dev/shm").glob("asyncrl-*"))  # noqa: S108
    )
    """Files in memory when this was made."""
    _phase: str = ""

    def phase(self, name: str) -> None:
        """Begin a phase of the test. If it fails, the test's error names it and the run's logs."""
        self._phase = name

    def where(self) -> str:
        """What a failed test says."""
        phase = f"It failed in the phase: {self._phase}. " if self._phase else ""
        return f"{phase}The run's logs are in {self.folder / 'logs'}"

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    def files_in_memory(self, process: str = "") -> list[Path]:
        """What runs of this name have in /dev/shm now, or the weights of one of their processes.

        What other runs of the name had left there before does not count.
        """
        which = f"-*-{process}-weights-*" if process else "-*"
        found = set(Path("/dev/shm").glob(f"asyncrl-{self.name}{which}"))  # noqa: S108
        return sorted(found - self.left_before)

    def arguments(self, *more: str, **settings: object) -> list[str]:
        own = {"model.path": self.model, "run.directory": self.runs, "run.name": self.name}
        values = own | {key.replace("__", "."): value for key, value in settings.items()}
        if values.get("scheduler.on_update", "verify") == "verify":  # not `auto`: cores are shared
            values.setdefault("scheduler.max_runahead_groups", 8)
        pairs = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        config = str(OWN / "run.yaml")
        return [sys.executable, "-m", "asyncrl", "run", config, *pairs, *more]

    def run(self, *more: str, **settings: object) -> subprocess.CompletedProcess[str]:
        return call(self.arguments(*more, **settings))

    def start(self, *more: str, **settings: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.arguments(*more, **settings),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pipesize=_PIPE,  # read at its end only: a run waits for room
        )
        self.started.append(process)
        return process

    def start_in_terminal(self, *more: str, **settings: object) -> Terminal:
        """Start a run in a terminal of its own, with the live panel."""
        terminal = Terminal(self.arguments(*more, **settings))
        self.started.append(terminal.process)
        return terminal

    def end(self) -> None:
        """Kill the runs that a failed test left behind."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=30)

    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.folder / "metrics.jsonl")

    def result(self) -> RunResult:
        return msgspec.json.decode((self.folder / "result.json").read_bytes(), type=RunResult)

    def steps(self) -> int:
        return len(self.metrics())

    def wait_for_steps(self, steps: int, *, seconds: float = 400) -> None:
        """Wait until the run that was started last has trained so many steps; fail if it ends."""
        until(
            lambda: self.steps() >= steps,
            seconds=seconds,
            what=f"{steps} steps",
            run=self.started[-1],
        )

    def children(self, role: str) -> list[int]:
        """Process ids of the run's processes of this role, without those that they fork."""
        marker = f'"role":"{role}"'.encode()
        folder = str(self.folder).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue
            if marker in command and folder in command:
                found.append(int(path.parent.name))
        # A process that was just forked, for environments say, bears its parent's command line.
        parents = {pid: status.parent for pid in found if (status := status_of(pid))}
        return [pid for pid, parent in parents.items() if parent not in found]


class Terminal:
    """A process in a session of its own, whose controlling terminal this is."""

    def __init__(self, arguments: list[str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process: subprocess.Popen[str] = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        self._shown: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # closed, at either end
            while chunk := os.read(self._keyboard, 4096):
                self._shown.append(chunk)

    @property
    def text(self) -> str:
        """What the screen has shown so far, with its control sequences, on one line."""
        return " ".join(b"".join(self._shown).decode(errors="replace").split())

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def close(self) -> None:
        """Close the window."""
        os.close(self._keyboard)


def call(arguments: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its output includes its errors."""
    return subprocess.run(
        arguments,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def call_here(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of asyncrl to its end in this process, which has imported its libraries.

    An error that would be a traceback is raised.

    Args:
        arguments: as for `call`: the interpreter, `-m`, `asyncrl`, and the rest.
    """
    assert arguments[1:3] == ["-m", "asyncrl"]
    output, code = io.StringIO(), 0
    with (
        mock.patch.multiple(sys, argv=["asyncrl", *arguments[3:]], path=list(sys.path)),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, output.getvalue())


def until(
    condition: Callable[[], Any],
    *,
    seconds: float,
    what: str,
    run: subprocess.Popen[str] | None = None,
) -> None:
    """Wait for a condition, with a deadline.

    Args:
        condition: true when the wait is over.
        seconds: to wait at most.
        what: is waited for.
        run: fail at once, with its output, when this process has ended.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if run is not None and run.poll() is not None:
            output, _ = run.communicate(timeout=30)
            pytest.fail(f"exit code {run.returncode} before {what}:\n{output}")
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s for {what}")
        time.sleep(0.05)


def worst_mismatch(steps: list[StepMetrics]) -> float:
    """The largest difference between engine and trainer, in nats; ignoring steps without one."""
    return max(step.mismatch.abs_max or 0.0 for step in steps)
