"""The types of processes that are killed, and how to find one of them in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.launch.identity import ProcessIdentity, identity_of, is_running
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
    if victim in (REWARD, ENGINE_CORE):
        wanted = b"asyncrl.rewards.worker" if victim is REWARD else b"EngineCore"
        return next((one for one in run.descendants() if wanted in command_of(one.pid)), None)
    alive = [
        record.process
        for record in run.children()
        if record.name.startswith(victim.name) and is_running(record.process)
    ]
    return alive[-1] if alive else None


def command_of(pid: int) -> bytes:
    """The command line of a process, which may be a title that it has given itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
