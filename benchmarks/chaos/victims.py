"""The types of processes that are killed, and how to find one of them in a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.launch.identity import (
    ProcessIdentity,
    identity_of,
    is_running,
    session_members,
)
from benchmarks.chaos.live_run import LiveRun


@dataclass(frozen=True)
class Victim:
    """A type of process."""

    name: str
    about: str
    """For the table."""
    engine: str = "torch"
    """The engine of the run in which it is killed."""


GENERATOR = Victim("generator", "generator")
TRAINER = Victim("trainer", "trainer")
REWARD = Victim("reward", "reward worker")
CONTROLLER = Victim("controller", "controller, then --resume")
ENGINE_CORE = Victim("engine-core", "vLLM engine core", engine="vllm")
VICTIMS = {one.name: one for one in (GENERATOR, TRAINER, REWARD, CONTROLLER, ENGINE_CORE)}


def find(run: LiveRun, victim: Victim) -> ProcessIdentity | None:
    """A living process of this type; None while there is none."""
    if victim is CONTROLLER:
        return identity_of(run.controller)
    if victim is REWARD:
        return _with_command(run.descendants(), b"asyncrl.rewards.worker")
    if victim is ENGINE_CORE:  # it overwrites its environment, but is in its generator's session
        leaders = {record.process.pid for record in run.children()}
        return _with_command(session_members(leaders), b"EngineCore")
    alive = [
        record.process
        for record in run.children()
        if record.name.startswith(victim.name) and is_running(record.process)
    ]
    return alive[-1] if alive else None


def _with_command(processes: Iterable[ProcessIdentity], text: bytes) -> ProcessIdentity | None:
    """The first of these whose command line, or the title it has given itself, has this text."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            if text in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                return process
    return None
