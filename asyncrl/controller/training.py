"""The training phase: events go to the scheduler, its commands go to the processes."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig
from asyncrl.controller.commands import CommandExecutor, SampleReports
from asyncrl.controller.group_traces import GroupTraces
from asyncrl.controller.progress import Progress
from asyncrl.controller.unfinished_work import SampleHandover
from asyncrl.errors import RunFailed
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker
from asyncrl.scheduler import events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.errors import ImpossibleEvent, SenderOutOfStep
from asyncrl.scheduler.run_ahead import RunAhead
from asyncrl.scheduler.scheduler import Scheduler
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages.from_generator import SampleFinished, SampleRewarded
from asyncrl.wire.messages.from_trainer import StepFinished
from asyncrl.wire.messages.to_generator import Rewind
from asyncrl.wire.records.step import RunAheadChoice

logger = logging.getLogger(__name__)

_CHANGES_THE_PACE = (
    events.GeneratorJoined,
    events.GeneratorLost,
    events.GeneratorLeaves,
    events.TrainerJoined,
    events.TrainerLost,
    events.PauseRequested,
    events.ResumeRequested,
)
"""Steps before and after these are not compared."""


@dataclass(eq=False)
class Training:
    """Runs the scheduler from the first step to the last.

    The scheduler exists from the start of the training phase on, and also handles events of the
    final evaluation. Earlier events are ignored: `run` passes it the state of all processes.
    """

    _whole: RunConfig
    _requests: SampleRequests
    _fleet: Fleet
    _progress: Progress
    _waiter: ConditionWait
    _moves: SampleHandover
    _run_ahead: RunAhead
    _traces: GroupTraces | None = None
    trained_steps: int = field(default=0, init=False)
    """Optimizer steps of the whole run, including those before a resume."""

    def __post_init__(self) -> None:
        self._config = ConfigByStep(self._whole)
        self._scheduler: Scheduler | None = None
        self._step_ended: float | None = None
        """Monotonic time at which the last step ended, if the next one is to be measured."""
        self._tells_of_trainers = False
        self._deciding = asyncio.Lock()
        self._reports = SampleReports()
        parts = self._requests, self._reports, self._fleet, self._progress, self._moves
        self._executor = CommandExecutor(*parts, self._config, self._step_of)

    def _step_of(self, group: int) -> int:
        return 0 if self._scheduler is None else self._scheduler.state.step_of(group)

    @property
    def has_begun(self) -> bool:
        """True once there is a scheduler, also after training."""
        return self._scheduler is not None

    @property
    def is_running(self) -> bool:
        """True if the scheduler has work to decide on."""
        return self._scheduler is not None and self._executor.finished is None

    @property
    def is_held(self) -> bool:
        """True if nothing can be finished: the run is paused, or no trainer takes samples."""
        state = None if self._scheduler is None else self._scheduler.state
        return state is not None and (state.paused or not state.trainer_joined)

    @property
    def verifies(self) -> bool:
        """True if tokens that were drawn elsewhere can be judged (`on_update: verify`)."""
        return self._config.verifies

    @property
    def has_steps_left(self) -> bool:
        """True if there are steps that `run` would train."""
        if self._scheduler is not None:
            return self.is_running
        return not (self.is_complete or self._waiter.stop_requested)

    @property
    def is_complete(self) -> bool:
        """True if every step of the run is trained."""
        return self.trained_steps >= self._config.whole.run.steps

    async def run(self) -> None:
        """Train until the last step or a stop by the user. Call it again if steps were lost later.

        Raises RunFailed if the scheduler cannot continue, WaitTimeout if a generator is silent.
        """
        if self._scheduler is None:
            if not self.has_steps_left:
                return
            if not await self.trainer_is_ready(lambda: self._waiter.stop_requested):
                return
            await self._begin()
        while (finished := self._executor.finished) is None:
            await self._waiter.next_change()
        await self._fresh_reports()
        self._progress.training_ends()
        if finished.outcome is RunOutcome.FAILED:
            raise RunFailed(finished.reason)
        if finished.reason:
            self._progress.say(finished.reason)

    async def trainer_is_ready(self, unless: Callable[[], bool]) -> bool:
        """Wait until the trainer is ready or `unless()` is true; return False if it is true."""
        await self._waiter.until(
            lambda: self._fleet.trainer.state == "ready" or unless(),
            seconds=self._config.whole.launcher.startup_seconds,
            what=lambda: f"{self._fleet.trainer.name} to become ready",
        )
        return not unless()

    async def _begin(self) -> None:
        first_step = self.trained_steps
        await self._return_generators(first_step)
        config = self._config.whole
        self._scheduler = Scheduler(
            config.scheduler.with_run_ahead(self._run_ahead.groups),
            first_step=first_step,
            total_steps=config.run.steps,
            changes=self._changes_from(0, self._config),
            first_groups=self._progress.first_groups(first_step),
            group_key=self._requests.prompt_index,
            sessions=config.environment.total_sessions,
        )
        await self._fresh_reports()
        self._progress.training_begins(self._scheduler, first_step)
        self._tell_run_ahead(first_step)
        self._tells_of_trainers = True
        if self._fleet.trainer.state == "ready":  # otherwise its replacement joins
            await self._trainer_joins()
        for worker in self._fleet.generators():
            joined = events.GeneratorJoined(worker.name, worker.slots, worker.policy_version)
            try:
                await self.apply(joined)
            except SenderOutOfStep as error:
                self._fleet.cut_off(worker.name, str(error))

    async def _return_generators(self, version: int) -> None:
        """Rewind generators with later weights, whose policies are gone with an earlier trainer."""

        def ahead() -> list[GeneratorWorker]:
            if not self._fleet.lineage:
                return []  # no trainer was lost
            return [one for one in self._fleet.generators() if one.policy_version > version]

        for worker in ahead():
            self._fleet.installations.drop(worker.name)
            await self._fleet.send(worker.name, Rewind(version, self._fleet.lineage))
        await self._waiter.until(
            lambda: not ahead(),
            seconds=self._config.whole.launcher.silence_seconds,
            what=lambda: f"{', '.join(one.name for one in ahead())} to return to step {version}",
        )

    async def trainer_ready(self, version: int, initial_weights: str) -> None:
        """Handle a trainer of this version that can take trajectories.

        Raises RunFailed unless the run started from the weights with the digest `initial_weights`.
        """
        try:
            self._requests.starts_from(initial_weights)
        except ValueError as error:
            raise RunFailed(
                f"the model in model.path was changed while the run was active: {error}. Start a "
                "new run from it"
            ) from error
        self.trained_steps = version
        if self._tells_of_trainers:
            await self._trainer_joins()

    async def trainer_lost(self) -> None:
        """Handle the loss of the trainer; another one may become ready."""
        if self._tells_of_trainers:
            await self.apply(events.TrainerLost())

    async def _trainer_joins(self) -> None:
        await self.apply(events.TrainerJoined(self.trained_steps, self._fleet.lineage))

    async def sample_finished(self, generator: str, report: SampleFinished) -> None:
        """Pass on a finished sample that a generator holds. Raises as `apply`."""
        if self._scheduler is None:
            return
        self._reports.add(generator, report)
        sample, version = report.sample, report.oldest_version
        try:
            await self.apply(events.SampleFinished(generator, sample, report.length, version))
        except ImpossibleEvent:
            self._reports.drop(generator, sample)
            raise
        if sample.group not in self._scheduler.state.groups:
            self._reports.drop(generator, sample)  # late: the group is settled already

    async def sample_rewarded(self, generator: str, reward: SampleRewarded) -> None:
        """Pass on the reward of a sample that a generator holds. Raises as `apply`."""
        if self._reports.is_about_last_report(generator, reward):
            event = events.SampleRewarded(generator, reward.sample, reward.reward)
            await self.apply(event)

    @property
    def first_unreached_group(self) -> int | None:
        """First group after all delivered and left-out ones, with dynamic sampling."""
        places = None if self._scheduler is None else self._scheduler.state.places
        return None if places is None else places.reached

    async def step_finished(self, report: StepFinished) -> None:
        """Pass on a step that the trainer took. Raises as `apply`."""
        await self.apply(events.StepFinished(report.step, report.groups))
        if self._scheduler is None:
            return
        settled = self._scheduler.state.ledger.first_group
        self._reports.forget_before(settled)
        await self._moves.forget_before(settled)
        await self._choose_run_ahead(self._scheduler, report)

    async def _choose_run_ahead(self, scheduler: Scheduler, report: StepFinished) -> None:
        """Measure a step; change how far the run goes ahead from the next free step on."""
        ended, self._step_ended = self._step_ended, time.monotonic()
        ahead, config = self._run_ahead, self._config
        self._tell_run_ahead(report.step + 1)
        if ended is None or not config.at(report.step).scheduler.chooses_run_ahead:
            return
        groups, why = ahead.groups, ahead.why
        ahead.on_step(
            report.step,
            seconds=self._step_ended - ended,
            tokens=report.metrics.batch.tokens,
            next_free=scheduler.state.first_free_step,
            last=config.whole.run.steps - 1,
        )
        if ahead.why != why:
            self._progress.say(f"run-ahead: {ahead.why}")
        self._tell_run_ahead(report.step + 1)
        step = scheduler.state.first_free_step
        if ahead.groups != groups and config.at(step).scheduler.chooses_run_ahead:
            async with self._deciding:
                step = scheduler.state.first_free_step
                here = config.at(step).scheduler.with_run_ahead(ahead.groups)
                changes = {step: here} | self._changes_from(step, config)
                await self._decide(scheduler, events.BoundsChanged(changes))

    def _tell_run_ahead(self, step: int) -> None:
        """Tell `Progress` what holds for a step."""
        ahead, chooses = self._run_ahead, self._config.at(step).scheduler.chooses_run_ahead
        choice = RunAheadChoice(steps=ahead.steps, tried=ahead.trying, why=ahead.why)
        self._progress.run_ahead = choice if chooses else RunAheadChoice()

    def _measure_anew(self) -> None:
        """Forget the times of steps: what they depend on has changed, or the run was paused."""
        self._step_ended = None
        self._run_ahead.restart()

    def _changes_from(self, step: int, config: ConfigByStep) -> dict[int, SchedulerConfig]:
        """Return the scheduler's settings of `run.changes` at this step and later ones."""
        groups = self._run_ahead.groups
        changed = config.scheduler_changes.items()
        return {at: one.with_run_ahead(groups) for at, one in changed if at >= step}

    async def apply(self, event: events.Event) -> None:
        """Pass the scheduler an event and execute its commands.

        Raises ImpossibleEvent, with nothing changed; RunFailed for a defect.
        """
        if self._scheduler is None:
            return
        # One event at a time, so that commands are sent in the order of the decisions.
        async with self._deciding:
            await self._decide(self._scheduler, event)

    async def _decide(self, scheduler: Scheduler, event: events.Event) -> None:
        try:
            if isinstance(event, _CHANGES_THE_PACE):
                self._measure_anew()
            began = time.monotonic()
            decided = scheduler.on_event(event)
            self._progress.decided(type(event).__name__, time.monotonic() - began)
            if isinstance(event, events.TrainerJoined):
                self._executor.lineage = event.lineage
            if scheduler.state.finished is None:
                self._executor.finished = None  # steps were lost after the last one
            if self._traces is not None:
                self._traces.note(event, decided)
            for command in decided:
                await self._executor.execute(command)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            logger.exception("the scheduler failed on %s", type(event).__name__)
            raise RunFailed(
                f"the scheduler could not handle {type(event).__name__}, which is a defect: "
                f"{type(error).__name__}: {error}"
            ) from error
        if self._executor.finished is not None:
            self._waiter.notify()

    @property
    def next_undeclared_step(self) -> int:
        """The first step that was not yet sent to the trainer."""
        scheduler = self._scheduler
        return self.trained_steps if scheduler is None else scheduler.state.next_undeclared

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler, once training has begun."""
        return self._scheduler

    def take_over(self, config: ConfigByStep) -> None:
        """Switch to another configuration, whose bounds the scheduler already has."""
        self._config = self._executor.config = config

    async def configure(
        self, config_from: Callable[[int], RunConfig], done: Callable[[RunConfig], None]
    ) -> int:
        """Change settings from the first step without issued groups on; return that step.

        `config_from` returns the run's configuration with the change at a step; its UserError
        changes nothing. `done` receives that configuration before anything else is decided.
        """
        async with self._deciding:
            scheduler = self._scheduler
            step = self.trained_steps if scheduler is None else scheduler.state.first_free_step
            whole = config_from(step)
            config = ConfigByStep(whole)
            if scheduler is not None:
                self._measure_anew()
                later = self._changes_from(step, config)
                await self._decide(scheduler, events.BoundsChanged(later))
            self.take_over(config)
            done(whole)
        return step

    async def _fresh_reports(self) -> None:
        """Wait until every generator has reported since now, so that totals are current."""
        now = time.monotonic()
        await self._waiter.until(
            lambda: all(worker.reported > now for worker in self._fleet.generators()),
            seconds=self._config.whole.launcher.silence_seconds,
            what=lambda: "reports of the generators",
        )
