"""A whole run whose trainer and generators are threads of this process.

Everything but the operating system's processes is real: controller, sockets, keys, engines, reward
workers, weights in shared memory. The import of torch and transformers, most of the cost of a short
run, is paid once for all of them.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from asyncrl_runs import OWN
from rich.console import Console

from asyncrl.config.run_config import load_config
from asyncrl.controller.execute import execute
from asyncrl.generator.setup import run_generator
from asyncrl.launch.child_spec import (
    ChildKeys,
    ChildSpec,
    GeneratorKeys,
    GeneratorSpec,
    TrainerKeys,
    TrainerSpec,
)
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.startup.prepare import prepare
from asyncrl.trainer_process.setup import run_trainer
from asyncrl.wire.records.step import RunResult, StepMetrics


class ThreadHandle:
    """One process of the run, as a thread."""

    def __init__(self, spec: ChildSpec, keys: ChildKeys) -> None:
        self.spec = spec
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(keys,), name=spec.name, daemon=True)
        self._thread.start()

    def _run(self, keys: ChildKeys) -> None:
        try:
            if isinstance(self.spec, GeneratorSpec) and isinstance(keys, GeneratorKeys):
                asyncio.run(run_generator(self.spec, keys))
            elif isinstance(self.spec, TrainerSpec) and isinstance(keys, TrainerKeys):
                asyncio.run(run_trainer(self.spec, keys))
            else:
                raise TypeError(f"{self.spec.name} has no thread to run in")
        except BaseException as error:  # noqa: BLE001 - kept for the controller
            self._error = error

    node = ""
    address = ""

    lost_with_machine = False

    def cause(self) -> str:
        return ""

    def exit_code(self) -> int | None:
        if self._thread.is_alive():
            return None
        return 0 if self._error is None else 1

    def end(self, *, by_force: bool) -> None:
        """A thread cannot be ended; it follows the controller's command to shut down."""

    def log_tail(self, lines: int = 12) -> str:
        return repr(self._error)


class ThreadLauncher:
    """Takes the place of `LocalLauncher`."""

    threads = 1
    uses_relays = False
    shares_processors = False

    def __init__(self, *_: object, **__: object) -> None:
        """Takes the arguments of `LocalLauncher`."""

    def start(self, spec: ChildSpec, keys: ChildKeys) -> ThreadHandle:
        return ThreadHandle(spec, keys)


@dataclass
class ThreadedRun:
    """Runs of examples/your_own/run.yaml with its own run folder and model."""

    runs: Path
    model: Path
    output: io.StringIO = field(default_factory=io.StringIO)

    @property
    def folder(self) -> Path:
        return self.runs / "your-own"

    def said(self) -> str:
        """What the terminal would have shown, on one line."""
        return " ".join(self.output.getvalue().split())

    def run(
        self, *, resume: bool = False, accept_changes: bool = False, **settings: object
    ) -> RunResult:
        """Carry out a run; `__` in a setting stands for the dot."""
        values = {"model.path": self.model, "run.directory": self.runs} | {
            key.replace("__", "."): value for key, value in settings.items()
        }
        pairs = [f"{key}={value}" for key, value in values.items()]
        return carry_out(
            OWN / "run.yaml", pairs, self.output, resume=resume, accept_changes=accept_changes
        )

    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.folder / "metrics.jsonl")


def carry_out(
    config: Path,
    settings: Sequence[str],
    output: io.StringIO,
    *,
    resume: bool = False,
    accept_changes: bool = False,
) -> RunResult:
    """Carry out a run with these settings; `ThreadLauncher` stands for `LocalLauncher`."""
    torch.set_num_threads(1)
    console = Console(file=output, width=120)
    prepared = prepare(load_config(config, list(settings)), console)
    return execute(
        prepared, resume=resume, clean=False, console=console, accept_changes=accept_changes
    )


def as_command(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """In the place of `subprocess.run` for `benchmarks.harness`: the run, in threads."""
    assert list(command[1:4]) == ["-m", "asyncrl", "run"]
    assert command[5] == "--end-with"
    assert set(command[7::2]) == {"--set"}
    output = io.StringIO()
    carry_out(Path(command[4]), command[8::2], output)
    return subprocess.CompletedProcess(command, 0, output.getvalue(), "")
