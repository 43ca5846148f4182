"""Kills processes of a run at random moments, one after the other, and measures each recovery."""

import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.launch.identity import ProcessIdentity, identity_of, is_running, send, session_members
from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.group_account import GroupAccount, read_account
from asyncrl.monitoring.records.spans import SpanKind, read_timelines
from asyncrl.wire.records.step import StepMetrics
from benchmarks.chaos.live_run import ChaosError, LiveRun, Setup


class Fault(Protocol):
    """Something that happens to a run."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

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


STEPS_AFTER = 3
"""Steps that must be finished after a kill before the next one: those that it can have delayed."""
MAX_SECONDS_BETWEEN = 2.0
"""The next kill follows after a uniformly drawn time up to this."""


@dataclass(frozen=True)
class Kill:
    victim: str
    step: int
    """Steps trained before it."""
    seconds_to_next_step: float
    """The longest time without a finished step, from the kill to STEPS_AFTER finished steps."""
    engine_start_seconds: float
    """From the start of the first process that was started in consequence, the controller
    included, until the last of them was ready; 0 if none was started."""
    end_seconds: float | None = None
    """Where the fault ends the run and a resume follows: from the fault to the run's end."""

    @property
    def seconds_beyond_start(self) -> float:
        """Of `seconds_to_next_step`: what was not the start of processes."""
        return max(0.0, self.seconds_to_next_step - self.engine_start_seconds)


@dataclass
class Outcome:
    """What came of one run in which processes were killed."""

    run: str
    about: str = ""
    """The fault, for the table."""
    wanted: int = 0
    """Kills that were to be made; 0: as many as `Findings` says."""
    kills: list[Kill] = field(default_factory=list)
    failure: str | None = None
    """Why a kill was not survived; None if all were."""
    exit_code: int | None = None
    """Of the controller that ended the run in order."""
    account: GroupAccount = field(default_factory=lambda: GroupAccount(0, (), (), ()))
    steps: list[StepMetrics] = field(default_factory=list)
    leftovers: dict[str, int] = field(default_factory=dict)

    @property
    def staleness_max(self) -> int:
        """The oldest token that was trained on, in optimizer steps."""
        return max((step.staleness.max for step in self.steps), default=0)

    def slowest(self) -> float | None:
        return max((kill.seconds_to_next_step for kill in self.kills), default=None)

    def slowest_end(self) -> float | None:
        """Largest `end_seconds`; None where no fault ended the run."""
        return max((one.end_seconds for one in self.kills if one.end_seconds), default=None)

    def median(self) -> float | None:
        seconds = [kill.seconds_to_next_step for kill in self.kills]
        return statistics.median(seconds) if seconds else None


def kill_one_after_the_other(
    setup: Setup,
    name: str,
    victims: Sequence[Fault],
    *,
    seed: int,
    make: Callable[[Setup, str, int], LiveRun] = LiveRun,
) -> Outcome:
    """Carry out a run in which these processes are killed in this order."""
    # Enough steps that the run is still training after the last kill.
    run = make(setup, name, 400 * (len(victims) + 1))
    outcome = Outcome(name, victims[0].about if len(set(victims)) == 1 else "", len(victims))
    moments = random.Random(seed)
    try:
        run.start()
        run.until(lambda: run.last_step_at() > 0, "its first step")
        run.note_sockets()
        for victim in victims:
            time.sleep(moments.uniform(0, MAX_SECONDS_BETWEEN))
            outcome.kills.append(_kill(run, victim, moments))
        outcome.exit_code = run.end()
    except ChaosError as error:
        outcome.failure = str(error)
    finally:
        run.abandon()
    try:
        outcome.account, outcome.steps = read_account(run.path), run.records()
    except (OSError, RecordError) as error:
        outcome.failure = outcome.failure or f"{name} has no records: {error}"
    outcome.leftovers = run.leftovers()
    return outcome


def _kill(run: LiveRun, victim: Fault, moments: random.Random) -> Kill:
    """Kill one process and wait until the run has recovered. Raises ChaosError if it does not."""
    run.until(lambda: victim.is_possible(run), f"a process of type {victim.name}")
    step = len(run.records())
    killed_at = time.time()
    victim.strike(run, moments)
    end_seconds = None
    if victim.ends_the_run:
        run.wait_for_the_end(victim.expected_error)
        end_seconds = time.time() - killed_at
        victim.repair(run)
        run.start("--resume")
    ends = [killed_at]
    for _ in range(STEPS_AFTER):
        last = ends[-1]
        run.until(lambda last=last: run.last_step_at() > last, f"a step after the {victim.name}")  # type: ignore[misc]
        ends.append(run.last_step_at())
    # Those that it did while it was not watched, too.
    ends += [one.time for one in run.records() if killed_at < one.time < ends[-1]]
    if not victim.ends_the_run:
        victim.repair(run)
    run.note_sockets()
    return Kill(
        victim.name,
        step,
        seconds_to_next_step=max(
            after - before for before, after in itertools.pairwise(sorted(ends))
        ),
        engine_start_seconds=_start_seconds(run, killed_at),
        end_seconds=end_seconds,
    )


def _start_seconds(run: LiveRun, since: float) -> float:
    """From the start of the first process since then until the last one was ready; 0 if none is."""
    tick = 1 / os.sysconf("SC_CLK_TCK")  # what `_unix_start` is exact to
    timelines = read_timelines(run.path / "timeline")
    controller = identity_of(run.controller)
    begun = [] if controller is None else [_unix_start(controller)]
    ready = []
    for record in run.children():
        started = _unix_start(record.process)
        begun.append(started)
        spans = timelines.get(record.name, ())
        starting = (s for s in spans if s.kind == SpanKind.STARTING and s.start >= started - tick)
        if started >= since and (span := next(starting, None)) is not None:
            ready.append(span.end)
    return max(ready) - min(one for one in begun if one >= since) if ready else 0.0


def _unix_start(process: ProcessIdentity) -> float:
    """When a process was started, as Unix time."""
    since_boot = process.started / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
