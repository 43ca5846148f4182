"""The trainer process: trajectories in, optimizer steps and new weights out.

intake      consumes: deliveries of generators. produces: acknowledgements, whole groups.
            waits for: generators. bounded by: the scheduler's admission of steps.
commands    consumes: messages of the hub. produces: step plans, a wish to save or to end.
            waits for: the controller. bounded by: its own end.
training    consumes: whole groups, step plans. produces: gradients, steps, weights, checkpoints.
            waits for: groups of this step, then its plan. unblocked by: intake and commands.
            bounded by: the groups of one step.
report      consumes: counters. produces: `TrainerReport`.
            waits for: the clock. bounded by: REPORT_SECONDS.

A group's gradient is accumulated as soon as the group is whole; the optimizer steps when every
group of the step's plan has been. Trajectories of later steps wait in the queue. A trajectory that
comes twice is acknowledged twice and kept once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from asyncrl.errors import AsyncrlError
from asyncrl.processes.group_queue import GroupQueue
from monitoring.metrics import TrainerMetrics
from monitoring.spans import SpanKind
from monitoring.timeline import Timeline
from trainer.config import TrainerConfig
from trainer.learner import Learner
from wire import Hub, Line, Unreachable
from wire.messages import data, from_trainer, to_trainer
from wire.records import TrainerTimes
from wire.weights.writer import WeightPublisher

logger = logging.getLogger("asyncrl.trainer")

REPORT_SECONDS = 0.5


class TrainerProcess:
    """The loops of the learner. Built by `run_trainer`."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        learner: Learner,
        queue: GroupQueue,
        groups_per_step: int,
        publisher: WeightPublisher,
        checkpoints: Path,
        control: Line[to_trainer.ToTrainer],
        data_hub: Hub[data.FromGeneratorData],
        timeline: Timeline,
        metrics: TrainerMetrics,
    ) -> None:
        self._config = config
        self._learner = learner
        self._queue = queue
        self._groups_per_step = groups_per_step
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._control = control
        self._data = data_hub
        self._timeline = timeline
        self._metrics = metrics
        self._plans: dict[int, frozenset[int]] = {}
        self._changed = asyncio.Event()
        self._stop: to_trainer.Shutdown | None = None
        self._saved_version = -1
        self._busy_seconds = 0.0

    async def run(self, *, metrics_port: int | None) -> None:
        """Publish the weights in hand, then train until told to shut down."""
        version = self._learner.policy_version
        self._saved_version = version  # what it was loaded from
        with self._timeline.span(SpanKind.TRANSFERRING_WEIGHTS, version=version):
            manifest = self._publisher.publish(self._learner.tensors(), version)
        await self._control.send(from_trainer.TrainerReady(version, manifest, metrics_port))
        async with asyncio.TaskGroup() as loops:
            background = [
                loops.create_task(self._intake()),
                loops.create_task(self._commands()),
                loops.create_task(self._reports()),
            ]
            await self._train()
            if self._stop is not None and self._stop.checkpoint:
                await self._save()
            for task in background:
                task.cancel()
        await self._control.send(from_trainer.Goodbye(self._learner.policy_version))

    async def _intake(self) -> None:
        while True:
            peer, delivery = await self._data.receive()
            try:
                self._queue.add(delivery, next_step=self._learner.policy_version)
            except ValueError as error:
                # A generator that sends nonsense is a bug, not weather: end the run and say so.
                raise AsyncrlError(
                    f"trajectory {delivery.sample} from {peer} cannot be trained on: {error}"
                ) from error
            # A generator that died meanwhile needs no answer; who takes over for it will ask again.
            with contextlib.suppress(Unreachable):
                await self._data.send(peer, data.Received(delivery.sample))
            self._changed.set()

    async def _commands(self) -> None:
        while True:
            match await self._control.receive():
                case to_trainer.StepPlan(step=step, groups=groups):
                    if step >= self._learner.policy_version:
                        self._plans[step] = frozenset(groups)
                case to_trainer.Shutdown() as shutdown:
                    self._stop = shutdown
            self._changed.set()

    async def _train(self) -> None:
        """Accumulate whole groups as they come; step when the plan is fulfilled."""
        done: set[int] = set()
        waited: defaultdict[str, float] = defaultdict(float)
        trained = 0.0
        while self._stop is None:
            step = self._learner.policy_version
            plan = self._plans.get(step)
            group = self._queue.take(step, allowed=plan)
            began = time.monotonic()
            if group is not None:
                index, trajectories, rewards = group
                with self._timeline.span(SpanKind.TRAINING, step=step):
                    await asyncio.to_thread(self._learner.add_group, trajectories, rewards)
                done.add(index)
                trained += time.monotonic() - began
            elif plan is not None and done - plan:
                raise AsyncrlError(
                    f"step {step}: groups {sorted(done - plan)} were reported as failed after they "
                    "had been accumulated; resume from the last checkpoint"
                )
            elif plan is not None and done >= plan:
                await self._finish_step(plan, waited=waited, trained=trained)
                done, waited, trained = set(), defaultdict(float), 0.0
            else:
                self._changed.clear()
                cause = waited_for(len(done), self._groups_per_step if plan is None else len(plan))
                with self._timeline.waiting(cause, step=step):
                    await self._changed.wait()
                waited[cause] += time.monotonic() - began
            self._busy_seconds += 0.0 if group is None else time.monotonic() - began

    async def _finish_step(
        self, plan: frozenset[int], *, waited: Mapping[str, float], trained: float
    ) -> None:
        step = self._learner.policy_version
        began = time.monotonic()
        with self._timeline.span(SpanKind.TRAINING, step=step):
            metrics = await asyncio.to_thread(self._learner.step)
        trained += time.monotonic() - began
        self._busy_seconds += time.monotonic() - began
        version = self._learner.policy_version
        began = time.monotonic()
        with self._timeline.span(SpanKind.TRANSFERRING_WEIGHTS, version=version):
            manifest = await asyncio.to_thread(
                self._publisher.publish, self._learner.tensors(), version
            )
        times = TrainerTimes(
            train_seconds=trained,
            publish_seconds=time.monotonic() - began,
            wait_seconds=sum(waited.values()),
            wait_first_seconds=waited.get("first group", 0.0),
            wait_last_seconds=waited.get("last group", 0.0),
        )
        finished = from_trainer.StepFinished(step, tuple(sorted(plan)), manifest, metrics, times)
        self._measure(finished)
        self._plans.pop(step, None)
        self._queue.forget_before(version)
        await self._control.send(finished)
        if version % self._config.checkpoint_every == 0:
            await self._save()

    def _measure(self, finished: from_trainer.StepFinished) -> None:
        metrics, manifest = self._metrics, finished.manifest
        metrics.publish(finished.metrics)
        metrics.steps.inc()
        metrics.tokens.inc(finished.metrics.batch.tokens)
        metrics.samples.inc(len(finished.groups) * self._queue.group_size)
        metrics.train_time.observe(finished.times.train_seconds)
        metrics.publish_time.observe(finished.times.publish_seconds)
        metrics.weights_size.set(manifest.nbytes)
        metrics.policy_version.set(manifest.policy_version)
        metrics.duplicates.follow(self._queue.duplicates)

    async def _save(self) -> None:
        version = self._learner.policy_version
        if version == self._saved_version:
            return
        path = self._checkpoints / f"step-{version:06d}"
        began = time.monotonic()
        with self._timeline.span(SpanKind.SAVING, version=version):
            await asyncio.to_thread(self._learner.save, path)
        self._metrics.checkpoint_time.observe(time.monotonic() - began)
        self._saved_version = version
        await self._control.send(from_trainer.CheckpointWritten(version, str(path)))

    async def _reports(self) -> None:
        while True:
            self._metrics.queued.set(self._queue.trajectories)
            self._timeline.flush()  # so that a long wait is seen while it lasts
            await self._control.send(
                from_trainer.TrainerReport(
                    self._learner.policy_version, self._queue.trajectories, self._busy_seconds
                )
            )
            await asyncio.sleep(REPORT_SECONDS)


def waited_for(done: int, groups: int) -> str:
    """What a trainer without a whole group waits for, of a step of so many groups.

    `first group`: nothing of the step has been trained on yet. `last group`: one is missing, which
    is the wait for the slowest sample. `step plan`: all are trained on, and the controller has not
    said yet that these are all.
    """
    if done >= groups:
        return "step plan"
    if done == 0:
        return "first group"
    return "last group" if done == groups - 1 else "more groups"
