"""The types of processes that are killed, and how to find one of them in a run."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncrl.launch.identity import (
    ProcessIdentity,
    identity_of,
    is_running,
    send,
    session_members,
)
from benchmarks.chaos.live_run import LiveRun


class Fault(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def engine(self) -> str:
        """The engine of the run to which it happens."""
        ...

    @property
    def ends_the_run(self) -> bool:
        """Whether the controller ends; then the run is resumed."""
        ...

    @property
    def expected_error(self) -> str | None:
        """What the ended run has to say; None: it was killed and says nothing."""
        ...

    def is_possible(self, run: LiveRun) -> bool: ...

    def strike(self, run: LiveRun, moments: random.Random) -> None: ...

    def repair(self, run: LiveRun) -> None:
        """Put right what no run can: before it is resumed, or after it has recovered."""
        ...


@dataclass(frozen=True)
class Victim:
    """A type of process that is killed."""

    name: str
    about: str
    engine: str = "torch"
    expected_error: str | None = None
    ranks: int = 1
    """Of the trainer of the run."""

    @property
    def ends_the_run(self) -> bool:
        """Only where it is the run's controller."""
        return self.name == "controller"

    def is_possible(self, run: LiveRun) -> bool:
        return find(run, self) is not None

    def strike(self, run: LiveRun, moments: random.Random) -> None:
        del moments
        process = find(run, self)
        if process is None:
            raise run.error(f"lost its {self.name} before it was killed")
        if self.ends_the_run:
            run.kill()
        else:
            send(process, signal.SIGKILL)

    def repair(self, run: LiveRun) -> None:
        """Nothing to do."""


GENERATOR = Victim("generator", "generator")
TRAINER = Victim("trainer", "trainer")
RANK = Victim("trainer-1", "rank 1 of a trainer of two", ranks=2)
REWARD = Victim("reward", "reward worker")
CONTROLLER = Victim("controller", "controller, then --resume")
ENGINE_CORE = Victim("engine-core", "vLLM engine core", engine="vllm")
VICTIMS = {one.name: one for one in (GENERATOR, TRAINER, RANK, REWARD, CONTROLLER, ENGINE_CORE)}


def find(run: LiveRun, victim: Victim) -> ProcessIdentity | None:
    """A living process of this type; None while there is none."""
    if victim.ends_the_run:
        return identity_of(run.controller)
    if victim is REWARD:
        return next(with_command(run.descendants(), b"asyncrl.rewards.worker"), None)
    if victim is ENGINE_CORE:  # it overwrites its environment, but is in its generator's session
        leaders = {record.process.pid for record in run.children()}
        return next(with_command(session_members(leaders), b"EngineCore"), None)
    alive = [
        record.process
        for record in run.children()
        if record.name.startswith(victim.name) and is_running(record.process)
    ]
    return alive[-1] if alive else None


def with_command(processes: Iterable[ProcessIdentity], text: bytes) -> Iterator[ProcessIdentity]:
    """Those whose command line, or the title that they have given themselves, has this text."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            if text in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                yield process
