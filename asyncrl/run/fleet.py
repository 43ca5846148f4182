"""The processes of a run: which there are, which live, what they last said."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.config import RunConfig
from asyncrl.errors import WaitTimeout
from asyncrl.launch import Launcher, ProcessHandle
from asyncrl.processes.spec import ChildSpec, Role
from asyncrl.run.directory import RunDirectory
from wire import RuntimeDirectory
from wire.messages import from_generator, from_trainer

_SUSPENDED_SECONDS = 10.0
"""A watch that comes so late was not running meanwhile."""


@dataclass(slots=True)
class Worker:
    """One process, from its start to its end."""

    name: str
    is_trainer: bool
    handle: ProcessHandle
    heard: float = field(default_factory=time.monotonic)
    """When it last said something (monotonic seconds)."""
    is_ready: bool = False
    said_goodbye: bool = False
    gone: bool = False
    reason: str = ""
    """What it said before it ended."""
    policy_version: int = -1
    slots: int = 0
    metrics_port: int | None = None
    reported: float = 0.0
    """When the last report came (monotonic seconds)."""
    generator_report: from_generator.GeneratorReport | None = None
    trainer_report: from_trainer.TrainerReport | None = None

    @property
    def state(self) -> str:
        """`starting`, `ready` or `lost`."""
        if self.gone:
            return "lost"
        return "ready" if self.is_ready else "starting"

    def ready(self, policy_version: int, slots: int, metrics_port: int | None) -> None:
        """It can take work."""
        self.is_ready = True
        self.policy_version = policy_version
        self.slots = slots
        self.metrics_port = metrics_port


class Fleet:
    """Starts, watches, replaces and ends the trainer and the generators."""

    def __init__(
        self,
        config: RunConfig,
        launcher: Launcher,
        directory: RunDirectory,
        runtime: RuntimeDirectory,
        *,
        model_path: str,
        stop_tokens: tuple[int, ...],
        resume: bool,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._directory = directory
        self._runtime = runtime
        self._model_path = model_path
        self._stop_tokens = stop_tokens
        self._resume = resume
        self._workers: dict[str, Worker] = {}
        self._restarts = 0
        self._started = 0
        self._ending = False
        self._looked = time.monotonic()

    def start_all(self) -> None:
        """Start the trainer and the generators."""
        self._start("trainer", "trainer")
        for index in range(self._config.launcher.generators):
            self._start(f"generator-{index}", "generator")

    def _start(self, name: str, role: Role, *, first: bool = True) -> Worker:
        self._started += 1
        spec = ChildSpec(
            role=role,
            name=name,
            run_directory=str(self._directory.path.resolve()),
            model_path=self._model_path,
            control_address=self._runtime.address("control"),
            data_address=self._runtime.address("data"),
            parent=os.getpid(),
            threads=self._launcher.threads_for(role),
            process_index=self._started,
            stop_tokens=self._stop_tokens,
            resume=self._resume,
            first=first,
        )
        worker = Worker(name, role == "trainer", self._launcher.start(spec))
        self._workers[name] = worker
        return worker

    @property
    def trainer(self) -> Worker:
        """The trainer."""
        return self._workers["trainer"]

    def generators(self) -> list[Worker]:
        """Generators that can take work now."""
        return [
            worker
            for worker in self._workers.values()
            if not worker.is_trainer and worker.is_ready and not worker.gone
        ]

    @property
    def has_generators(self) -> bool:
        """Whether a generator lives, ready or not."""
        return any(not worker.is_trainer for worker in self.alive)

    @property
    def alive(self) -> list[Worker]:
        """Processes that have not ended, as far as is known."""
        return [worker for worker in self._workers.values() if not worker.gone]

    @property
    def all_ready(self) -> bool:
        """Whether all that live can take work."""
        return all(worker.is_ready for worker in self.alive)

    def unready(self) -> str:
        """Names of those that cannot take work yet."""
        return ", ".join(worker.name for worker in self.alive if not worker.is_ready)

    def everyone(self) -> Iterable[Worker]:
        """All that were ever started, lost ones included."""
        return self._workers.values()

    def metrics_ports(self) -> dict[str, int]:
        """Where each process serves its metrics."""
        return {
            worker.name: worker.metrics_port
            for worker in self.alive
            if worker.metrics_port is not None
        }

    def heard_from(self, name: str) -> Worker | None:
        """Note a sign of life; None for a stranger."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.heard = time.monotonic()
        return worker

    def deaths(self) -> list[tuple[Worker, str]]:
        """Processes found dead since the last call, each once, and how they ended."""
        found = []
        now = time.monotonic()
        if now - self._looked > _SUSPENDED_SECONDS:
            # This process was stopped (Ctrl-Z) or starved: the silence was its own.
            for worker in self.alive:
                worker.heard = now
        self._looked = now
        for worker in self.alive:
            code = worker.handle.exit_code()
            silent = time.monotonic() - worker.heard
            launcher = self._config.launcher
            limit = launcher.silence_seconds if worker.is_ready else launcher.startup_seconds
            if code is not None:
                reason = _how_it_ended(code) + (f": {worker.reason}" if worker.reason else "")
            elif silent > limit:
                worker.handle.end(by_force=True)
                setting = "silence_seconds" if worker.is_ready else "startup_seconds"
                reason = f"said nothing for {silent:.0f} s ({setting}) and was killed"
            else:
                continue
            worker.gone = True
            found.append((worker, reason))
        return found

    def restart(self, lost: Worker) -> str | None:
        """Start a generator in place of a lost one; None when too many were lost, or at the end."""
        if self._ending or self._restarts >= self._config.launcher.max_restarts:
            return None
        self._restarts += 1
        base = lost.name.split(".")[0]
        return self._start(f"{base}.{self._restarts}", "generator", first=False).name

    def end_all(self, *, by_force: bool = False) -> None:
        """Ask those that have not ended to end, or kill them; does not wait."""
        self._ending = True
        for worker in self.alive:
            worker.handle.end(by_force=by_force)

    def wait_for_end(self) -> None:
        """Wait until all have ended; kill those that have not in time, and say so.

        Generators get launcher.stop_seconds, the trainer launcher.checkpoint_seconds more.

        Raises:
            WaitTimeout: some had to be killed.
        """
        began = time.monotonic()
        launcher = self._config.launcher
        left = self.alive
        killed: list[str] = []
        while left:
            left = [worker for worker in left if worker.handle.exit_code() is None]
            waited = time.monotonic() - began
            for worker in left:
                extra = launcher.checkpoint_seconds if worker.is_trainer else 0.0
                if waited > launcher.stop_seconds + extra and worker.name not in killed:
                    worker.handle.end(by_force=True)
                    killed.append(worker.name)
            time.sleep(0.02)
        if killed:
            waited = time.monotonic() - began
            raise WaitTimeout(f"{', '.join(killed)} did not end within {waited:.0f} s: killed")


def _how_it_ended(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"
