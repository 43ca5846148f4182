"""The conductor: one event loop between generators, trainer, scheduler and user.

              prompts ──┐                       ┌── InstallWeights ◄── StepFinished ──┐
                        ▼                       ▼                                     │
    scheduler ─► Generate ─► generators ─► SampleFinished ─► scheduler ─► Deliver     │
                                 │                                                    │
                                 └──────────── trajectories (data line) ──────────► trainer

pump        consumes: messages of all processes. produces: scheduler events, commands to them.
            waits for: any process. bounded by: watch (a process that dies or falls silent).
watch       consumes: exit codes, times of life. produces: losses, restarts, failures.
            waits for: the clock. bounded by: WATCH_SECONDS.
show        consumes: reports, the scheduler's view. produces: the live view.
            waits for: the clock. bounded by: SHOW_SECONDS.
phases      evaluate, train, evaluate; each looks again whenever pump or watch did something.
            waits for: a condition, named. unblocked by: `_changed`, or `_broken`.
            bounded by: the phase's timeout; training by what it waits for being watched.

Whatever breaks the run is put into `_broken` once and raised wherever a phase waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import RunFailed, UserError, WaitTimeout
from asyncrl.evaluation.round import Accuracy, EvaluationRound
from asyncrl.run.directory import RunDirectory, RunState
from asyncrl.run.fleet import Fleet, Worker
from asyncrl.run.progress import Progress
from asyncrl.run.prompt_order import DataOrder, payload_of, sample_seed
from asyncrl.tasks.prompts import Task
from monitoring.timeline import Timeline
from rollout.trajectory import SampleId
from scheduler import commands as cmd
from scheduler import events as ev
from scheduler.scheduler import Scheduler
from wire import Hub, Unreachable
from wire.messages import control as ctl
from wire.messages import from_generator as fg
from wire.messages import from_trainer as ft
from wire.messages import to_generator as tg
from wire.messages import to_trainer as tt
from wire.weights.layout import WeightManifest

logger = logging.getLogger("asyncrl.run.controller")

WATCH_SECONDS = 0.2
SHOW_SECONDS = 0.25


class Controller:
    """Carries one run from its first process to its result."""

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        directory: RunDirectory,
        state: RunState,
        fleet: Fleet,
        hub: Hub[fg.FromGenerator | ft.FromTrainer],
        progress: Progress,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._task = task
        self._directory = directory
        self._state = state
        self._fleet = fleet
        self._hub = hub
        self._progress = progress
        self._timeline = timeline
        self._scheduler: Scheduler | None = None
        self._evaluation: EvaluationRound | None = None
        self._evaluated_version = 0
        """The version that the evaluation is of; answers of older ones do not count."""
        self._manifest: WeightManifest | None = None
        self._deciding = asyncio.Lock()
        self._changed = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._finish: cmd.FinishRun | None = None
        self._stop_wanted = False
        self.trained_steps = 0
        """Optimizer steps of the whole run, those before a resume included."""

    # ---------------------------------------------------------------- phases

    async def run(self) -> tuple[Accuracy | None, Accuracy | None]:
        """Evaluate, train, evaluate. Returns the accuracy before and after.

        After is None when the run was stopped before its last step.

        Raises:
            RunFailed: a process died for good, or nothing could be trained.
            UserError: the user's part is at fault (reward, prompt, model).
            WaitTimeout: a process did not become ready, or an evaluation did not end.
        """
        loops = [
            asyncio.create_task(self._guarded(loop))
            for loop in (self._pump, self._watch, self._show)
        ]
        try:
            self._fleet.start_all()
            await self._until(
                lambda: self._fleet.all_ready or self._stop_wanted,
                seconds=self._config.launcher.startup_seconds,
                what=lambda: f"{self._fleet.unready()} to become ready",
            )
            before = await self._evaluate_before()
            await self._train()
            finished = self.trained_steps >= self._config.run.steps
            return before, await self._evaluate_after() if finished else None
        finally:
            for loop in loops:
                loop.cancel()

    async def _evaluate_before(self) -> Accuracy | None:
        state = self._state
        if state.accuracy_before is not None:
            right = round(state.accuracy_before * state.evaluation_samples)
            accuracy = Accuracy(right, state.evaluation_samples)
        else:
            measured = await self._evaluate(0)
            if measured is None:
                return None
            accuracy = measured
            state.accuracy_before = accuracy.value
            state.evaluation_samples = accuracy.samples
            self._directory.write_state(state)
        self._progress.evaluated("before", accuracy)
        return accuracy

    async def _evaluate_after(self) -> Accuracy | None:
        manifest = self._manifest
        if manifest is None:
            raise RunFailed("no weights were ever published")
        for worker in self._fleet.generators():
            if worker.policy_version < manifest.policy_version:
                await self._send(worker.name, tg.InstallWeights(manifest))
        await self._until(
            lambda: all(
                worker.policy_version >= manifest.policy_version
                for worker in self._fleet.generators()
            ),
            seconds=self._config.launcher.startup_seconds,
            what=lambda: f"generators to install version {manifest.policy_version}",
        )
        accuracy = await self._evaluate(1)
        if accuracy is not None:
            self._progress.evaluated("after", accuracy)
        return accuracy

    async def _evaluate(self, number: int) -> Accuracy | None:
        """One round over the held-out prompts on all generators; None when it was stopped."""
        config = self._config.evaluation
        total = min(config.prompts, len(self._task.evaluation)) * config.samples
        self._evaluated_version = 0 if self._manifest is None else self._manifest.policy_version
        self._evaluation = current = EvaluationRound(number, total, threshold=config.threshold)
        for worker in self._fleet.generators():
            await self._ask_for_evaluation(worker)
        await self._until(
            lambda: current.complete or self._stop_wanted,
            seconds=config.timeout_seconds,
            what=lambda: f"evaluation samples ({current.finished} of {total} came back)",
            progress=lambda: current.finished,
        )
        self._evaluation = None
        return current.accuracy() if current.complete else None

    async def _ask_for_evaluation(self, worker: Worker) -> None:
        """Keep this generator busy while an evaluation goes on."""
        current = self._evaluation
        if current is None or worker.policy_version < self._evaluated_version:
            return
        for index in current.next_for(worker.name, worker.slots * 2):
            prompt = self._task.evaluation[index // self._config.evaluation.samples]
            seed = sample_seed(self._config.run.seed, "evaluation", current.number, index)
            order = tg.Evaluate(current.number, index, payload_of(prompt), seed)
            await self._send(worker.name, order)

    async def _train(self) -> None:
        first_step = max(0, self._fleet.trainer.policy_version)
        self.trained_steps = first_step
        if self._stop_wanted or first_step >= self._config.run.steps:
            return
        order = DataOrder(len(self._task.train), self._config.run.seed)
        self._scheduler = Scheduler(
            self._config.scheduler,
            first_step=first_step,
            total_steps=self._config.run.steps,
            group_key=order.index,
        )
        self._order = order
        await self._hear_counters()
        self._progress.training_begins(self._scheduler, first_step)
        await self._apply(ev.TrainerJoined(first_step))
        for worker in self._fleet.generators():
            await self._apply(ev.GeneratorJoined(worker.name, worker.slots, worker.policy_version))
        while self._finish is None:
            self._changed.clear()
            await self._next_change()
        finish = self._finish
        await self._hear_counters()
        self._progress.training_ends()
        if finish.outcome is cmd.RunOutcome.FAILED:
            raise RunFailed(finish.reason)

    async def _hear_counters(self) -> None:
        """Wait for a report of each generator from now, so that totals are of this moment."""
        now = time.monotonic()
        await self._until(
            lambda: all(worker.reported > now for worker in self._fleet.generators()),
            seconds=self._config.launcher.silence_seconds,
            what=lambda: "reports of generators",
        )

    async def _until(
        self,
        condition: Callable[[], bool],
        *,
        seconds: float,
        what: Callable[[], str],
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        """Wait until the pump made this true, at most so long without progress.

        Raises:
            WaitTimeout: naming what was waited for.
        """
        deadline, made = time.monotonic() + seconds, progress()
        while not condition():
            if progress() != made:
                deadline, made = time.monotonic() + seconds, progress()
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"waited {seconds:.0f} s for {what()}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._next_change()

    async def _next_change(self) -> None:
        """Until something happened; raises what broke the run, if something did."""
        change = asyncio.ensure_future(self._changed.wait())
        either: set[asyncio.Future[Any]] = {change, self._broken}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        if self._broken.done():
            self._broken.result()

    # ----------------------------------------------------------------- loops

    async def _guarded(self, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop that breaks ends the run with what broke it; nothing stops silently."""
        try:
            await loop()
        except Exception as error:  # noqa: BLE001 - the edge: raised again where the phases wait
            self._end_with(error)

    async def _pump(self) -> None:
        while True:
            name, message = await self._hub.receive()
            worker = self._fleet.heard_from(name)
            if worker is None:
                logger.warning("%s from %r, which is not one of us", type(message).__name__, name)
                continue
            if worker.is_trainer:
                await self._from_trainer(worker, message)
            else:
                await self._from_generator(worker, message)
            self._changed.set()

    async def _from_generator(  # noqa: C901 - one flat case per message
        self, worker: Worker, message: fg.FromGenerator | ft.FromTrainer
    ) -> None:
        name = worker.name
        match message:
            case fg.GeneratorReady():
                worker.ready(message.policy_version, message.slots, message.metrics_port)
                await self._generator_joined(worker)
            case fg.SampleFinished():
                await self._apply(
                    ev.SampleFinished(
                        name,
                        message.sample,
                        message.length,
                        message.oldest_version,
                    )
                )
            case fg.SampleFailed():
                if message.user_error:
                    self._end_with(UserError(message.reason))
                else:
                    await self._apply(ev.SampleFailed(name, message.sample, message.reason))
            case fg.SampleDelivered():
                await self._apply(ev.SampleDelivered(name, message.sample))
            case fg.EvaluationSample():
                if self._evaluation is not None and self._evaluation.number == message.round:
                    if message.policy_version < self._evaluated_version:
                        self._evaluation.again(message.index)
                    else:
                        self._evaluation.came_back(message.index, message.reward)
                    await self._ask_for_evaluation(worker)
            case fg.WeightsInstalled():
                worker.policy_version = message.policy_version
                await self._apply(ev.WeightsInstalled(name, message.policy_version))
                await self._ask_for_evaluation(worker)
            case fg.GeneratorReport():
                worker.generator_report, worker.reported = message, time.monotonic()
                await self._apply(ev.KvUsed(name, message.engine.kv_used))
            case fg.Failure():
                self._failed(worker, message.reason, user_error=message.user_error)
            case fg.Goodbye():
                worker.said_goodbye = True
            case _:
                logger.warning("%s from a generator", type(message).__name__)

    async def _from_trainer(
        self, worker: Worker, message: fg.FromGenerator | ft.FromTrainer
    ) -> None:
        match message:
            case ft.TrainerReady():
                worker.ready(message.policy_version, 0, message.metrics_port)
                self._manifest = message.manifest
            case ft.StepFinished():
                self._manifest = message.manifest
                worker.policy_version = message.manifest.policy_version
                self.trained_steps = message.manifest.policy_version
                self._progress.step_finished(message)
                await self._apply(ev.WeightsPublished(message.manifest.policy_version))
                await self._apply(ev.StepFinished(message.step, message.groups))
            case ft.CheckpointWritten():
                logger.info("checkpoint of version %d: %s", message.policy_version, message.path)
            case ft.TrainerReport():
                worker.trainer_report = message
            case ft.Failure():
                self._failed(worker, message.reason, user_error=message.user_error)
            case ft.Goodbye():
                worker.said_goodbye = True
            case _:
                logger.warning("%s from the trainer", type(message).__name__)

    async def _generator_joined(self, worker: Worker) -> None:
        self._state.metrics_ports = self._fleet.metrics_ports()
        self._directory.write_state(self._state)
        if self._scheduler is not None:
            await self._apply(ev.GeneratorJoined(worker.name, worker.slots, worker.policy_version))
        elif self._manifest is not None and worker.policy_version < self._evaluated_version:
            await self._send(worker.name, tg.InstallWeights(self._manifest))
        await self._ask_for_evaluation(worker)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for worker, reason in self._fleet.deaths():
                self._progress.say(f"{worker.name} {reason}\n{worker.handle.last_words()}")
                self._progress.died("trainer" if worker.is_trainer else "generator")
                if worker.is_trainer:
                    raise RunFailed(
                        f"the trainer {reason}; its last words:\n{worker.handle.last_words()}"
                    )
                await self._evaluation_lost(worker)
                await self._apply(ev.GeneratorLost(worker.name))
                self._replace(worker, reason)
                self._changed.set()

    async def _evaluation_lost(self, worker: Worker) -> None:
        if self._evaluation is not None:
            self._evaluation.lost(worker.name)
            for other in self._fleet.generators():
                await self._ask_for_evaluation(other)

    def _replace(self, worker: Worker, reason: str) -> None:
        name = self._fleet.restart(worker)
        if name is not None:
            self._progress.say(f"started {name} in place of {worker.name}")
        elif not self._fleet.has_generators:
            raise RunFailed(
                f"{worker.name} {reason} and no generator is left (launcher.max_restarts is "
                f"{self._config.launcher.max_restarts}); its last words:\n"
                f"{worker.handle.last_words()}"
            )

    async def _show(self) -> None:
        while True:
            self._progress.show(self._fleet, self._evaluation)
            await asyncio.sleep(SHOW_SECONDS)

    # ----------------------------------------------------------------- deeds

    async def _apply(self, event: ev.Event) -> None:
        """Tell the scheduler a fact and carry out what it decides."""
        if self._scheduler is None:
            return
        # One event at a time: commands reach the processes in the order of the decisions.
        async with self._deciding:
            began = time.monotonic()
            commands = self._scheduler.on_event(event)
            self._progress.decided(type(event).__name__, time.monotonic() - began)
            for command in commands:
                await self._carry_out(command)

    async def _carry_out(self, command: cmd.Command) -> None:  # noqa: C901 - flat
        match command:
            case cmd.StartSample(generator=name, sample=sample, priority=priority):
                await self._send(name, self._generate(sample, priority))
            case cmd.VerifySamples(generator=name, samples=samples, min_version=version):
                seeds = tuple(self._seed("verify", sample, version) for sample in samples)
                await self._send(name, tg.Verify(samples, seeds, version))
            case cmd.InstallWeights(generator=name):
                if self._manifest is not None:
                    rebuild = self._config.scheduler.on_update == "recompute"
                    await self._send(name, tg.InstallWeights(self._manifest, rebuild))
            case cmd.DeliverGroup(step=step, samples=samples):
                holders: dict[str, list[SampleId]] = {}
                for name, sample in samples:
                    holders.setdefault(name, []).append(sample)
                for name, held in holders.items():
                    await self._send(name, tg.Deliver(step, tuple(held)))
            case cmd.DeclareStep(step=step, groups=groups):
                await self._send(self._fleet.trainer.name, tt.StepPlan(step, groups))
            case cmd.DiscardSamples(generator=name, samples=samples):
                await self._send(name, tg.Discard(samples))
            case cmd.ReportGroupFailed(group=group, reason=reason):
                self._progress.say(f"group {group} is left out: {reason}")
            case cmd.PauseGenerator(generator=name):
                await self._send(name, tg.Pause())
            case cmd.ResumeGenerator(generator=name):
                await self._send(name, tg.Resume())
            case cmd.FinishRun():
                self._finish = command
                self._changed.set()

    def _generate(self, sample: SampleId, priority: int) -> tg.Generate:
        prompt = self._task.train[self._order.index(sample.group)]
        return tg.Generate(sample, payload_of(prompt), self._seed("training", sample), priority)

    def _seed(self, purpose: str, sample: SampleId, *what: object) -> int:
        return sample_seed(self._config.run.seed, purpose, sample.group, sample.sample, *what)

    async def _send(self, name: str, message: tg.ToGenerator | tt.ToTrainer) -> None:
        """Send to a process; one that is gone is found by the watch."""
        try:
            await self._hub.send(name, message)
        except Unreachable as error:
            logger.warning("%s", error)

    # ------------------------------------------------------------- the user

    async def answer(self, request: ctl.Request) -> ctl.Reply:
        """Carry out a user's request."""
        match request:
            case ctl.StatusRequest():
                return ctl.StatusReply(self._progress.status(self._fleet, self._evaluation))
            case ctl.StopRequest():
                await self.stop()
                return ctl.Accepted("the step in hand is finished, then a checkpoint is written")
            case ctl.PauseRequest():
                if self._scheduler is None or self._finish is not None:
                    return ctl.Refused("only training can be paused, and it does not go on now")
                await self._apply(ev.PauseRequested())
                return ctl.Accepted("generators stop drawing tokens")
            case ctl.ResumeRequest():
                await self._apply(ev.ResumeRequested())
                return ctl.Accepted("generators go on")

    async def stop(self) -> None:
        """Finish the step in hand, then end in order."""
        self._stop_wanted = True
        self._progress.stopping = True
        await self._apply(ev.StopRequested())
        self._changed.set()

    def _failed(self, worker: Worker, reason: str, *, user_error: bool) -> None:
        """A process said why it ends. The user's faults end the run; others the watch handles."""
        worker.reason = reason
        if user_error:
            self._end_with(UserError(reason))

    def _end_with(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
