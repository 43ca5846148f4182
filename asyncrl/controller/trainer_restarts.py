"""Replaces a lost trainer by one that continues from the newest intact checkpoint.

    lost ──► choose a checkpoint ──► start trainer.N ──► ready ──► records back to its step ──►
    `TrainerJoined`: the scheduler rewinds the generators (`asyncrl.scheduler.scheduler`)

Generators continue. A trainer ends the run if it exits before it was ever ready or by a user's
mistake, or if its replacements finish no step or are all lost at the same step.
"""

import asyncio
from dataclasses import dataclass, field

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.progress import Progress
from asyncrl.controller.training import Training
from asyncrl.errors import RunFailed
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import TrainerRank
from asyncrl.launch.shared_memory import remove_weights
from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.runs.directory import RunDirectory
from asyncrl.runs.resuming import rewind
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.files import ResumePoint, choose
from asyncrl.trainer.checkpoint.trainer_lease import raise_fence
from asyncrl.wire.records.step import StepMetrics

MAX_TRIES = 3
"""Limit of trainers lost in a row without finishing a step, or at the same step."""


@dataclass(eq=False)
class TrainerRestarts:
    """Handles the loss of a trainer, and the readiness of its replacement."""

    _config: RunConfig
    _directory: RunDirectory
    _fleet: Fleet
    _training: Training
    _evaluation: FleetEvaluation
    _progress: Progress
    _waiter: ConditionWait
    _began: int = field(default=0, init=False)
    _fruitless: int = field(default=0, init=False)
    """Trainers lost in a row before they finished a step."""
    _lost_at: int = field(default=-1, init=False)
    """Steps trained when the last one was lost."""
    _at_one_step: int = field(default=0, init=False)
    """Trainers lost in a row at that step."""
    _point: ResumePoint = field(default_factory=ResumePoint, init=False)

    async def replace(self, lost: TrainerRank, reason: str) -> None:
        """Start another trainer, unless the run is stopping. Raises RunFailed if it cannot."""
        if lost.waits_for_room:
            raise RunFailed(f"{lost.name} {reason}")
        await self._training.trainer_lost()
        if self._waiter.stop_requested:
            self._progress.say("the run is stopping, so no other trainer is started")
            return
        self._give_up_if_hopeless(lost, reason)
        try:
            fence = await asyncio.to_thread(raise_fence, self._directory.path)
            self._point = await asyncio.to_thread(choose, self._directory.path / "checkpoints")
        except CheckpointError as error:
            raise RunFailed(f"the trainer {reason}, so the run cannot continue: {error}") from error
        # Their memory is needed: the new trainer reserves as much before it is ready.
        remove_weights(self._fleet.trainer.spec.run_id, self._fleet.trainer.name)
        before = " and ".join(worker.name for worker in self._fleet.ranks)
        resume_from = None if self._point.directory is None else self._point.step
        name = self._fleet.restart_trainer(lost, resume_from, fence)
        if name is None:
            raise RunFailed(
                f"the trainer {reason}, and launcher.max_restarts "
                f"({self._fleet.config.max_restarts}) does not allow another; the end of its log:\n"
                f"{lost.handle.log_tail()}"
            )
        repeated = max(0, self._training.trained_steps - self._point.step)
        start = "the checkpoint of" if self._point.directory is not None else "the model at"
        self._progress.say(
            f"started {name} in place of {before}, from {start} step {self._point.step}; "
            f"steps to train again: {repeated}"
        )

    async def ready(self, worker: TrainerRank, initial_weights: str) -> None:
        """Handle a ready trainer; a replacement returns to its step. Raises as `trainer_ready`."""
        version = self._began = worker.policy_version
        if self._fleet.lineage:
            self._return_to_resume_point()
            self._evaluation.rewound(self._point.step)
        await self._training.trainer_ready(version, initial_weights)
        if self._fleet.lineage and self._training.has_steps_left:
            self._evaluation.abandon()
        if not self._training.has_begun:
            for generator in self._fleet.generators():
                await self._evaluation.update(generator)

    def _return_to_resume_point(self) -> None:
        """Set newer checkpoints aside, and drop the records of steps that are trained again.

        If the disk refuses, the records stay, superseded by those of repeated steps.
        """
        path, step = self._directory.path, self._point.step
        metrics = path / "metrics.jsonl"
        earlier: list[StepMetrics] | None = None
        try:
            if self._progress.has_waiting_records():
                raise OSError(f"{metrics} cannot be written, and lines of it wait in memory")
            scheduler = self._config.scheduler
            per_step, most = scheduler.groups_per_step, scheduler.max_groups_of_step
            for sentence in rewind(path, self._point, groups_per_step=per_step, max_groups=most):
                self._progress.say(sentence)
            earlier = read_metrics(metrics)
        except (OSError, RecordError) as error:
            self._progress.say(
                f"the records of steps after {step} could not be dropped: {error}. The run "
                "continues; records of the repeated steps are appended and supersede them, and the "
                "next trainer or --resume tries again"
            )
        self._progress.rewound(earlier, step)

    def _give_up_if_hopeless(self, lost: TrainerRank, reason: str) -> None:
        if lost.has_left:
            return  # its machine was taken away with notice, so the next one may succeed
        code = lost.handle.exit_code()
        if not self._fleet.lineage and not lost.is_ready and code is not None and code >= 0:
            raise RunFailed(
                f"before it was ready, the trainer {reason}; the end of its log:\n"
                f"{lost.handle.log_tail()}"
            )
        step = self._training.trained_steps
        self._fruitless = 0 if lost.is_ready and step > self._began else self._fruitless + 1
        self._at_one_step = self._at_one_step + 1 if step == self._lost_at else 1
        self._lost_at = step
        if self._fruitless > MAX_TRIES:
            what = "before any of them finished a step"
        elif self._at_one_step > MAX_TRIES:
            what = "at the same step"
        else:
            return
        raise RunFailed(
            f"{MAX_TRIES + 1} trainers in a row were lost {what}; the last one, {lost.name}, "
            f"{reason}, with {step} steps trained; the end of its log:\n{lost.handle.log_tail()}"
        )
