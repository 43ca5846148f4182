"""Replaces a trainer that was lost by one that continues from the newest whole checkpoint.

    lost ──► choose a checkpoint ──► start trainer.N ──► ready ──► records back to its step ──►
    `TrainerJoined`: the scheduler has the generators rewind (`scheduler.rewind`)

Generators continue meanwhile. A trainer that cannot be replaced ends the run: one that never became
ready and ended by itself, one that a user's mistake ends, or one whose replacements do not get the
run further than it was.
"""

from __future__ import annotations

import asyncio
import os

from asyncrl.config import RunConfig
from asyncrl.errors import RunFailed
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.processes.shared_memory import remove_weights
from asyncrl.run.directory import RunDirectory
from asyncrl.run.fleet import Fleet, Worker
from asyncrl.run.progress import Progress
from asyncrl.run.resuming import rewind
from asyncrl.run.training import Training
from asyncrl.run.waiting import Waiter
from monitoring.metrics_log import read_metrics
from trainer.checkpoint_files import ResumePoint, choose
from trainer.errors import CheckpointError

MAX_TRIES = 3
"""Trainers that may be lost, one after the other, without the run getting further."""


class TrainerRestarts:
    """What follows when a trainer is lost, and when its replacement is ready."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        fleet: Fleet,
        *,
        training: Training,
        evaluation: FleetEvaluation,
        progress: Progress,
        waiter: Waiter,
    ) -> None:
        self._config = config
        self._directory = directory
        self._fleet = fleet
        self._training = training
        self._evaluation = evaluation
        self._progress = progress
        self._waiter = waiter
        self._furthest = -1
        self._tries = 0
        self._point = ResumePoint()
        """Where the trainer that is being started continues."""
        self._lost: list[str] = []
        """Names of lost trainers whose weights are still in memory."""

    async def replace(self, lost: Worker, reason: str) -> None:
        """Start another trainer, unless the run is stopping.

        Raises:
            RunFailed: another one would be lost as well, is not allowed, or has no checkpoint.
        """
        await self._training.trainer_lost()
        if self._waiter.stop_requested:
            self._progress.say("the run is stopping, so no other trainer is started")
            return
        self._give_up_if_hopeless(lost, reason)
        try:
            self._point = await asyncio.to_thread(choose, self._directory.path / "checkpoints")
        except CheckpointError as error:
            raise RunFailed(
                f"the trainer {reason}, and the run cannot continue: {error}"
            ) from error
        resume_from = None if self._point.directory is None else self._point.step
        name = self._fleet.restart_trainer(resume_from)
        if name is None:
            raise RunFailed(
                f"the trainer {reason}, and launcher.max_restarts ({self._fleet.max_restarts}) "
                f"does not allow another; its last words:\n{lost.handle.log_tail()}"
            )
        self._lost.append(lost.name)
        repeated = max(0, self._training.trained_steps - self._point.step)
        start = "the checkpoint of" if self._point.directory is not None else "the model at"
        self._progress.say(
            f"started {name} in place of {lost.name}, from {start} step {self._point.step}; "
            f"steps to train again: {repeated}"
        )

    async def ready(self, worker: Worker) -> None:
        """A trainer is ready. If it replaces a lost one, return to its step."""
        version = worker.policy_version
        if self._fleet.lineage:
            self._return_to_resume_point()
        await self._training.trainer_ready(version)
        if self._fleet.lineage and self._training.is_running:
            self._evaluation.abandon()
        if not self._training.has_begun:
            for generator in self._fleet.generators():
                await self._evaluation.update(generator)

    def rewound(self) -> None:
        """A generator has rewound. After the last one nobody reads a lost trainer's weights."""
        if all(worker.lineage == self._fleet.lineage for worker in self._fleet.generators()):
            for name in self._lost:
                remove_weights(self._config.run.name, os.getpid(), name)
            self._lost.clear()

    def _return_to_resume_point(self) -> None:
        """Set newer checkpoints aside, and drop the records of steps that are trained again."""
        path = self._directory.path
        per_step = self._config.scheduler.groups_per_step
        for sentence in rewind(path, self._point, groups_per_step=per_step):
            self._progress.say(sentence)
        self._progress.rewound(read_metrics(path / "metrics.jsonl"), self._point.step)

    def _give_up_if_hopeless(self, lost: Worker, reason: str) -> None:
        code = lost.handle.exit_code()
        if not self._fleet.lineage and not lost.is_ready and code is not None and code >= 0:
            raise RunFailed(
                f"the trainer {reason} before it was ready; its last words:\n"
                f"{lost.handle.log_tail()}"
            )
        if self._training.trained_steps > self._furthest:
            self._furthest, self._tries = self._training.trained_steps, 0
        self._tries += 1
        if self._tries > MAX_TRIES:
            raise RunFailed(
                f"{self._tries} trainers in a row were lost before the run got further than step "
                f"{self._furthest}; the last one, {lost.name}, {reason}; its last words:\n"
                f"{lost.handle.log_tail()}"
            )
