"""The trainer process: trajectories in, optimizer steps and new weights out.

| loop     | consumes                  | produces                        | waits for            | bounded by          |
|----------|---------------------------|---------------------------------|----------------------|---------------------|
| intake   | deliveries of generators  | acknowledgements, whole groups  | generators           | the scheduler's     |
| commands | messages of the hub       | step plans, checkpoints, an end | the controller       | its own end         |
| training | whole groups, step plans  | gradients, steps, weights       | groups of this step  | the step's groups   |
| report   | counters                  | `TrainerReport`                 | the clock            | REPORT_SECONDS      |

A group's gradient is accumulated as soon as the group is whole; the optimizer steps when every group
of the step's plan has been. Trajectories of later steps wait in the queue, which the scheduler's
admission rule bounds. A trajectory that comes twice is acknowledged twice and kept once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path


from asyncrl.errors import AsyncrlError, UserError
from asyncrl.processes.child import ChildSpec
from asyncrl.processes.group_queue import GroupQueue
from asyncrl.wire import Hub, Line
from monitoring.exporter import start_exporter
from monitoring.metrics import TrainerMetrics
from monitoring.timeline import Kind, Timeline
from scheduler.messages import data, from_trainer, to_trainer
from trainer.checkpoint import latest
from trainer.config import TrainerConfig
from trainer.errors import TrainerError
from trainer.learner import Learner
from trainer.publish import WeightPublisher

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
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._control = control
        self._data = data_hub
        self._timeline = timeline
        self._metrics = metrics
        self._plans: dict[int, frozenset[int]] = {}
        self._changed = asyncio.Event()
        self._stop: to_trainer.Shutdown | None = None
        self._save_now = False
        self._saved_version = -1
        self._busy_seconds = 0.0

    async def run(self, *, data_address: str, metrics_port: int | None) -> None:
        """Publish the weights in hand, then train until told to shut down."""
        version = self._learner.policy_version
        manifest = self._publisher.publish(self._learner.tensors(), version)
        await self._control.send(
            from_trainer.TrainerReady(version, manifest, data_address, metrics_port)
        )
        async with asyncio.TaskGroup() as loops:
            background = [
                loops.create_task(self._intake()),
                loops.create_task(self._commands()),
                loops.create_task(self._reports()),
            ]
            await self._train()
            for task in background:
                task.cancel()
        if self._stop is not None and self._stop.checkpoint:
            await self._save()
        await self._control.send(from_trainer.Goodbye(self._learner.policy_version))

    async def _intake(self) -> None:
        while True:
            peer, delivery = await self._data.receive()
            try:
                self._queue.add(delivery, next_step=self._learner.policy_version)
            except ValueError as error:
                logger.error("refused trajectory %s from %s: %s", delivery.sample, peer, error)
                continue
            await self._data.send(peer, data.Received(delivery.sample))
            self._changed.set()

    async def _commands(self) -> None:
        while True:
            match await self._control.receive():
                case to_trainer.StepPlan(step=step, groups=groups):
                    if step >= self._learner.policy_version:
                        self._plans[step] = frozenset(groups)
                case to_trainer.SaveCheckpoint():
                    self._save_now = True
                case to_trainer.Shutdown() as shutdown:
                    self._stop = shutdown
            self._changed.set()

    async def _train(self) -> None:
        """Accumulate whole groups as they come; step when the plan is fulfilled."""
        done: set[int] = set()
        waited = trained = 0.0
        while self._stop is None:
            step = self._learner.policy_version
            plan = self._plans.get(step)
            group = self._queue.take(step, allowed=plan)
            began = time.monotonic()
            if group is not None:
                index, trajectories, rewards = group
                with self._timeline.span(Kind.TRAINING, step=step):
                    await asyncio.to_thread(self._learner.add_group, trajectories, rewards)
                done.add(index)
                trained += time.monotonic() - began
            elif plan is not None and done >= plan:
                await self._finish_step(plan, waited=waited, trained=trained)
                done, waited, trained = set(), 0.0, 0.0
            else:
                self._changed.clear()
                with self._timeline.span(Kind.WAITING, cause="trajectories"):
                    await self._changed.wait()
                waited += time.monotonic() - began
            self._busy_seconds += 0.0 if group is None else time.monotonic() - began

    async def _finish_step(self, plan: frozenset[int], *, waited: float, trained: float) -> None:
        step = self._learner.policy_version
        began = time.monotonic()
        with self._timeline.span(Kind.TRAINING, step=step):
            metrics = await asyncio.to_thread(self._learner.step)
        trained += time.monotonic() - began
        self._busy_seconds += time.monotonic() - began
        version = self._learner.policy_version
        began = time.monotonic()
        with self._timeline.span(Kind.TRANSFERRING_WEIGHTS, version=version):
            manifest = await asyncio.to_thread(
                self._publisher.publish, self._learner.tensors(), version
            )
        metrics |= {
            "train_seconds": trained,
            "wait_seconds": waited,
            "publish_seconds": time.monotonic() - began,
        }
        self._metrics.observe_step(metrics)
        self._plans.pop(step, None)
        self._queue.forget_before(version)
        await self._control.send(
            from_trainer.StepFinished(step, tuple(sorted(plan)), manifest, metrics)
        )
        if self._save_now or version % self._config.checkpoint_every == 0:
            await self._save()

    async def _save(self) -> None:
        version = self._learner.policy_version
        self._save_now = False
        if version == self._saved_version:
            return
        path = self._checkpoints / f"step-{version:06d}"
        await asyncio.to_thread(self._learner.save, path)
        self._saved_version = version
        await self._control.send(from_trainer.CheckpointWritten(version, str(path)))

    async def _reports(self) -> None:
        while True:
            self._metrics.queued_trajectories.set(self._queue.trajectories)
            await self._control.send(
                from_trainer.TrainerReport(
                    self._learner.policy_version, self._queue.trajectories, self._busy_seconds
                )
            )
            await asyncio.sleep(REPORT_SECONDS)


async def run_trainer(spec: ChildSpec) -> None:
    """Load or resume the learner, publish its weights, and serve the controller."""
    config = spec.config()
    directory = Path(spec.run_directory)
    control: Line[to_trainer.ToTrainer] = Line(
        spec.control_address, spec.name, to_trainer.ToTrainer
    )
    data_hub: Hub[data.FromGeneratorData] = Hub(spec.data_address, data.FromGeneratorData)
    timeline = Timeline(directory / "timeline" / f"{spec.name}.jsonl", spec.name)
    metrics = TrainerMetrics(spec.name)
    publisher = WeightPublisher(Path("/dev/shm"), f"{config.run.name}-{spec.parent}")  # noqa: S108
    exporter = None
    try:
        with timeline.span(Kind.STARTING):
            if spec.metrics_port is not None:
                exporter = start_exporter(
                    metrics.registry, config.monitoring.host, spec.metrics_port
                )
            learner = Learner(
                config.trainer.model_copy(update={"threads": spec.threads}),
                spec.model_path,
                group_size=config.scheduler.group_size,
                seed=config.run.seed,
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                total_steps=config.run.steps,
            )
            newest = latest(directory / "checkpoints") if spec.resume else None
            if newest is not None:
                learner.restore(newest)
        process = TrainerProcess(
            config.trainer,
            learner=learner,
            queue=GroupQueue(config.scheduler.group_size),
            publisher=publisher,
            checkpoints=directory / "checkpoints",
            control=control,
            data_hub=data_hub,
            timeline=timeline,
            metrics=metrics,
        )
        await process.run(
            data_address=spec.data_address,
            metrics_port=None if exporter is None else exporter.port,
        )
    except (AsyncrlError, TrainerError) as error:
        await control.send(from_trainer.Failure(str(error), isinstance(error, UserError)))
        raise
    finally:
        timeline.close()
        publisher.close()
        if exporter is not None:
            exporter.close()
        data_hub.close()
        control.close()
