"""One process of a run as the controller knows it, and how its end is detected."""

import contextlib
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.config.launcher import LauncherConfig
from asyncrl.launch.child_spec import ChildSpec, GeneratorSpec, RelaySpec, Role, TrainerSpec
from asyncrl.launch.interface import ProcessHandle
from asyncrl.wire.messages import from_generator, from_relay, from_trainer
from asyncrl.wire.weights.layout import WeightManifest

_RELAY_SHARE, _RELAY_SECONDS = 0.25, 10.0
"""A relay's share of `launcher.silence_seconds`, and its minimum. Processes behind a silent relay
are silent too, and must be heard through its replacement before their own limit."""


@dataclass(slots=True)
class Worker:
    """One process from its start to its end; each role has a subclass with its reports."""

    spec: ChildSpec
    handle: ProcessHandle
    heard: float = field(default_factory=time.monotonic)
    """Time of its last message, in monotonic seconds, as `started`."""
    started: float = field(default_factory=time.monotonic)
    is_said_to_wait: bool = False
    is_ready: bool = False
    is_gone: bool = False
    has_left: bool = False
    has_waited: bool = False
    """True while it has never been placed on a node."""
    reason: str = ""
    metrics_port: int | None = None

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self.spec.name

    @property
    def role(self) -> Role:
        """Its role in the run."""
        return self.spec.role

    @property
    def node(self) -> str | None:
        """Its node, once it is placed."""
        return self.handle.node

    @property
    def waits_for_room(self) -> bool:
        """True if it was ordered, and the launcher has no node for it yet."""
        return not self.is_ready and self.node is None

    @property
    def is_leaving(self) -> bool:
        """True if it was ordered to leave, which only generators are."""
        return False

    @property
    def state(self) -> str:
        """`starting`, `ready`, `leaving`, `left` or `lost`."""
        if self.is_gone:
            return "left" if self.has_left else "lost"
        if self.is_leaving:
            return "leaving"
        return "ready" if self.is_ready else "starting"


@dataclass(slots=True)
class TrainerRank(Worker):
    """One rank of a trainer."""

    spec: TrainerSpec
    gives_way: bool = False
    """True if it was ended because another rank is losing its machine."""
    policy_version: int = -1
    """Version of its weights; -1 if unknown."""
    weights: WeightManifest | None = None
    data_address: str = ""
    ready_message: from_trainer.TrainerReady | None = None
    """Its report that it can take samples; it is ready when all ranks can."""
    report: from_trainer.TrainerReport | None = None

    def ready(self, policy_version: int, metrics_port: int | None) -> None:
        """Note that it can take work."""
        self.is_ready = True
        self.policy_version = policy_version
        self.metrics_port = metrics_port


@dataclass(slots=True)
class GeneratorWorker(Worker):
    """One generator."""

    spec: GeneratorSpec
    leave_by: float | None = None
    """Time after which it is killed, once it was ordered to leave (monotonic seconds). Extended
    while the run is paused or lacks a trainer."""
    was_overdue: bool = False
    policy_version: int = -1
    slots: int = 0
    report: from_generator.GeneratorReport | None = None
    reported: float = 0.0

    @property
    def index(self) -> int:
        """Its number, shared by its replacements."""
        return self.spec.index

    @property
    def is_leaving(self) -> bool:
        """True if it was ordered to leave."""
        return self.leave_by is not None

    def ready(self, policy_version: int, slots: int, metrics_port: int | None) -> None:
        """Note that it can take work."""
        self.is_ready = True
        self.policy_version = policy_version
        self.slots = slots
        self.metrics_port = metrics_port


@dataclass(slots=True)
class RelayWorker(Worker):
    """One relay."""

    spec: RelaySpec
    ready_message: from_relay.RelayReady | None = None
    """Its report when it was ready: where its parts listen."""

    @property
    def waits_for_room(self) -> bool:
        """False: a relay is started on a node, and takes no room there."""
        return False

    def ready(self, message: from_relay.RelayReady) -> None:
        """Note that it serves its node."""
        self.is_ready = True
        self.ready_message = message
        self.metrics_port = message.metrics_port


def what_starts(workers: Iterable[Worker]) -> str:
    """Describe the processes that are not ready, and what each logged last."""
    starting = (one for one in workers if not one.is_ready)
    logged = [f"{one.name} (its log ends with: {one.handle.log_tail(1)})" for one in starting]
    return f"{', '.join(logged)} to become ready (launcher.startup_seconds)"


def cause_of_death(worker: Worker, now: float, limits: LauncherConfig) -> str | None:
    """Return how a process ended, if it did. Kills one that was silent for too long."""
    code = worker.handle.exit_code()
    if code is not None:
        gives_way = isinstance(worker, TrainerRank) and worker.gives_way
        was_to_end = worker.is_leaving or gives_way or worker.handle.lost_with_machine
        if was_to_end and code in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            worker.has_left = True
            cause = worker.handle.cause()
            return "has left" + (f": {cause}" if cause else "")
        how = worker.handle.cause() or _how_it_ended(code)
        return how + (f": {worker.reason}" if worker.reason else "")
    if isinstance(worker, GeneratorWorker) and now > (worker.leave_by or now):
        worker.handle.end(by_force=True)
        worker.was_overdue = True
        return (
            f"did not leave within {limits.leave_seconds:.0f} s (launcher.leave_seconds) and was "
            "killed; its samples are generated again"
        )
    if worker.waits_for_room:
        worker.has_waited = True
        return _without_room(worker, now, limits)
    if worker.has_waited:  # only now does it begin to start
        worker.has_waited, worker.heard = False, now
    limit = limits.silence_seconds if worker.is_ready else limits.startup_seconds
    if isinstance(worker, RelayWorker) and worker.is_ready:
        limit = min(limit, max(_RELAY_SHARE * limit, _RELAY_SECONDS))
    silent = now - worker.heard
    if silent <= limit:
        return None
    worker.handle.end(by_force=True)
    if worker.is_ready:
        of_relay = ", a quarter of it for a relay" if isinstance(worker, RelayWorker) else ""
        what = f"launcher.silence_seconds{of_relay}"
        return f"sent nothing for {silent:.0f} s ({what}) and was killed"
    return (
        f"was not ready after {silent:.0f} s (launcher.startup_seconds) and was killed; its log "
        f"ends with: {worker.handle.log_tail(1)}"
    )


def left_early(worker: Worker, ranks: Sequence[TrainerRank]) -> bool:
    """Return True if a rank left and others, which complete the checkpoint of all, have not."""
    is_rank = any(worker is one for one in ranks)
    return is_rank and worker.has_left and any(one.handle.exit_code() is None for one in ranks)


def _without_room(worker: Worker, now: float, limits: LauncherConfig) -> str | None:
    """Return why an unplaced generator is given up; `Fleet.deaths` lets it wait."""
    waited = now - worker.heard
    if waited <= limits.cluster.place_seconds:
        return None
    worker.handle.end(by_force=True)
    why = "no agent is free" if limits.kind == "agents" else "the cluster has no free resources"
    return f"was not placed within {waited:.0f} s ({limits.cluster_key}.place_seconds): {why}"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
