"""What is done to a run, and which alerts follow."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from asyncrl.launch.identity import send
from asyncrl.runs.directory import read_state
from benchmarks.chaos.live_run import LiveRun

DISK = "64m"
"""Size of the disk that is filled."""


@dataclass(frozen=True)
class Fault:
    """One fault. With nothing to strike with, the children inject it.

    They are `child`, `reward` and `environment`.
    """

    name: str
    alerts: frozenset[str]
    """That have to fire."""
    follow: frozenset[str] = frozenset()
    """That may fire too, since they are right."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE of this run."""
    strike: Callable[[LiveRun, Path], None] | None = None
    """Called with the run and the folder of its disk."""
    keeps_striking: bool = False
    from_start: bool = False
    """The settings are the fault, so there is no healthy time before it."""
    small_disk: bool = False


def kill_controller(run: LiveRun, _disk: Path) -> None:
    run.kill()


def kill_generators(run: LiveRun, _disk: Path) -> None:
    """SIGKILL for each generator that there is now."""
    for record in run.children():
        if record.name.startswith("generator"):
            send(record.process, signal.SIGKILL)


def fill(_run: LiveRun, disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def knock(run: LiveRun, _disk: Path) -> None:
    """Speak to the controller without a key."""
    state = read_state(run.path)
    assert state is not None
    sockets = Path(state.control_address.removeprefix("ipc://")).parent
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDTIMEO, 1000)
    peer.connect(f"ipc://{sockets / 'control'}")
    for _ in range(20):
        with contextlib.suppress(zmq.ZMQError):
            peer.send(b"open")
        time.sleep(0.1)
    peer.close(linger=0)
    context.term()


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "asyncrl-alerts", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _names(*short: str) -> frozenset[str]:
    return frozenset(f"Asyncrl{one}" for one in short)


_STALLED = _names("StepOverdue", "PhaseOverdue", "GeneratorIdle", "TrainerIdle")

_ENVIRONMENT = ("environment.name=benchmarks/alerts/environment.py:OneTurn", "rewards.functions=[]")
"""Settings of a run whose samples an environment judges."""

FAULTS = (
    Fault("killed controller", _names("ProcessDown"), strike=kill_controller),
    Fault(
        "generators killed again and again",
        _names("NoGeneratorReady", "ProcessesRestart", "GroupsFail"),
        follow=_STALLED | _names("ProcessDown"),
        settings=("scheduler.max_attempts=1",),
        strike=kill_generators,
        keeps_striking=True,
    ),
    Fault("hanging reward", _names("StepOverdue", "PhaseOverdue"), follow=_STALLED),
    Fault(
        "slow reward",
        _names("GeneratorIdle", "TrainerIdle"),
        follow=_STALLED,
        settings=("scheduler.groups_per_step=1",),
    ),
    Fault("slow trainer", _names("PhaseOverdue", "GeneratorIdle"), follow=_STALLED),
    Fault(
        "wrong weights",
        _names("WrongPolicy", "LogprobMismatch"),
        follow=_names("RejectedShareJumped", "NothingToLearn", "AnswersTruncated"),
        # Of groups without signal no log-probability is computed otherwise.
        settings=("trainer.skip_zero_variance_groups=false",),
    ),
    Fault(
        "policy that runs away",
        _names("RejectedShareJumped"),
        follow=_names("NothingToLearn", "AnswersTruncated"),
    ),
    Fault("engine that scores badly", _names("NoiseFloorHigh")),
    Fault("constant reward", _names("NothingToLearn")),
    Fault(
        "answers that are cut off",
        _names("AnswersTruncated"),
        follow=_names("NothingToLearn"),
        settings=("sampling.max_tokens=6",),
        from_start=True,
    ),
    Fault("reward that fails", _names("RewardErrors")),
    Fault("environment that fails", _names("EnvironmentErrors"), settings=_ENVIRONMENT),
    Fault(
        "slow environment",
        _names("EnvironmentsSlow"),
        follow=_STALLED,
        settings=(*_ENVIRONMENT, "environment.sessions=16"),
    ),
    Fault("environment that cannot go back", _names("SamplesStartOver"), settings=_ENVIRONMENT),
    Fault(
        "full disk",
        _names("CheckpointFailed", "CheckpointOverdue", "DiskFull", "SampleLogIncomplete"),
        strike=fill,
        small_disk=True,
    ),
    Fault("stranger at a socket", _names("StrangersRefused"), strike=knock),
)
NOT_INJECTED = {
    "AsyncrlKvFull": "the torch engine reserves KV space for each slot, so nothing waits for it",
}
"""By alert: why no fault here raises it."""
