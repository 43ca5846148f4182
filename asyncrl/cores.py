"""Which core each process of a run is given, when `launcher.pin_cores` is set. Pure, but `stay_on`.

    cores       0 .. t-1       t .. 2t-1      2t .. 3t-1     3t ..
    process     generator-0    generator-1    trainer        controller and reward workers

t is the threads of a process. Where no core is left over, the controller and the reward workers
share the trainer's: what they do is short (some milliseconds per sample) and the trainer's work can
be late by that much, whereas a generator that is interrupted delays every row of its step. The
generator's own event loop (messages, detokenizing) stays on the generator's core: it runs between
two of its steps anyway.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import UserError

HELPER_CORES = "ASYNCRL_HELPER_CORES"
"""Environment variable that tells a process on which cores its reward workers run: `1` or `2,3`."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores by role; no core is in two of generators and trainer."""

    generators: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]
    helpers: tuple[int, ...]
    """Of the controller and the reward workers: what is left over, else the trainer's."""

    def of(self, name: str) -> tuple[int, ...]:
        """Cores of a process by its name; a replacement (`generator-0.1`) gets its place."""
        if not name.startswith("generator-"):
            return self.trainer
        return self.generators[int(name.removeprefix("generator-").split(".")[0])]


def plan_cores(available: Sequence[int], *, generators: int, threads: int) -> CorePlan:
    """Give each generator and the trainer `threads` cores of their own.

    Raises:
        UserError: there are not enough cores.
    """
    needed = (generators + 1) * threads
    if needed > len(available):
        raise UserError(
            f"launcher.pin_cores: {generators} generator(s) and a trainer with {threads} thread(s) "
            f"each need {needed} cores, this process may use {len(available)}. Lower "
            "launcher.threads or launcher.generators, or leave pin_cores out"
        )
    cores = sorted(available)
    blocks = [tuple(cores[i * threads : (i + 1) * threads]) for i in range(generators + 1)]
    return CorePlan(tuple(blocks[:-1]), blocks[-1], tuple(cores[needed:]) or blocks[-1])


def stay_on(cores: Sequence[int], pid: int = 0) -> None:
    """Keep a process on these cores: every thread that it has, and so all that it starts later."""
    tasks = Path(f"/proc/{pid or os.getpid()}/task")
    for thread in tasks.iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def stay_on_helper_cores() -> None:
    """For what a generator starts beside its engine: leave the generator's core, if told to."""
    told = os.environ.get(HELPER_CORES)
    if told:
        stay_on([int(core) for core in told.split(",")])
