"""Writes the trainer's checkpoints, and tries again when the disk does not take one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config_by_step import ConfigByStep
from asyncrl.processes.trainer.checkpoint_writer import CheckpointWriter
from asyncrl.processes.trainer.step_trainer import TrainerRecords
from monitoring.spans import SpanKind
from trainer.checkpoint_files import path_of
from trainer.errors import CheckpointUnwritable
from trainer.learner import Learner
from wire.messages.from_trainer import CheckpointFailed, CheckpointWritten, StepFinished
from wire.records import TrainedStep


class Checkpoints:
    """Saves the learner to `DIRECTORY/step-NNNNNN`, each version at most once.

    If the disk does not take a checkpoint, or hangs, training continues. Another is tried after 1,
    2, 4, ... steps, at most `every` apart, and whenever one is due.

    Args:
        learner: at the version that it was loaded or resumed from, which is not saved again.
        directory: of all checkpoints of the run.
        every: steps between two checkpoints.
        limit_seconds: longest time for one checkpoint.
        records: metrics and the time line.
    """

    def __init__(
        self,
        learner: Learner,
        directory: Path,
        *,
        every: int,
        limit_seconds: float,
        records: TrainerRecords,
    ) -> None:
        self._learner = learner
        self._writer = CheckpointWriter(learner, limit_seconds=limit_seconds)
        self._directory = directory
        self._every: Callable[[int], int] = lambda _version: every
        self._metrics = records.metrics
        self._timeline = records.timeline
        self._sample_log = records.samples
        self._saved_version = learner.policy_version
        self._failures = 0
        self._retry_at: int | None = None
        self._unsaved: list[TrainedStep] = []
        self._metrics.checkpoint_every.set(every)
        self._metrics.checkpointed.set(time.time())

    def configure(self, config: ConfigByStep) -> None:
        """Take over what the user changed."""
        self._every = lambda version: config.at(version).trainer.checkpoint_every
        self._writer.limit_seconds = config.whole.launcher.checkpoint_seconds
        self._metrics.checkpoint_every.set(self._every(self._learner.policy_version))

    def finished(self, step: StepFinished) -> None:
        """Note a step, which the next checkpoint will hold."""
        self._unsaved.append(
            TrainedStep(
                step=step.step,
                time=time.time(),
                groups=step.groups,
                metrics=step.metrics,
                times=step.times,
            )
        )
        self._metrics.unsaved.set(len(self._unsaved))

    @property
    def is_due(self) -> bool:
        """Whether the present version is one of every so many, or is to be tried again."""
        version = self._learner.policy_version
        is_retry = self._retry_at is not None and version >= self._retry_at
        return is_retry or version % self._every(version) == 0

    @property
    def can_save(self) -> bool:
        """Whether `save` would begin to write: there is something new, and the disk answers."""
        return self._learner.policy_version != self._saved_version and not self._writer.hangs

    @property
    def path(self) -> Path:
        """Of the present version's checkpoint."""
        return path_of(self._directory, self._learner.policy_version)

    async def save_if_due(self) -> CheckpointWritten | CheckpointFailed | None:
        """Save every so many steps, or try again; None if the present version is not due."""
        return await self.save() if self.is_due else None

    async def save_as_ordered(self) -> CheckpointWritten | CheckpointFailed:
        """Save the present version unless it is saved already."""
        version = self._learner.policy_version
        saved = CheckpointWritten(version, str(path_of(self._directory, version)))
        return await self.save() or saved

    async def save(self) -> CheckpointWritten | CheckpointFailed | None:
        """Save the present version; None if it is saved already."""
        version = self._learner.policy_version
        if version == self._saved_version:
            return None
        if self._sample_log is not None:
            await self._sample_log.written()  # a resumed run does not train these steps again
        path = path_of(self._directory, version)
        began = time.monotonic()
        try:
            with self._timeline.span(SpanKind.SAVING, version=version):
                await self._writer.write(path, self._unsaved)
        except CheckpointUnwritable as error:
            self._failures += 1
            wait = min(2 ** (self._failures - 1), self._every(version))
            self._retry_at = version + wait
            self._metrics.checkpoints_failed.of(error.cause).inc()
            return CheckpointFailed(version, error.cause, str(error), self._retry_at)
        self._metrics.checkpoint_time.observe(time.monotonic() - began)
        self._saved_version, self._failures, self._retry_at = version, 0, None
        self._unsaved = []
        self._metrics.unsaved.set(0)
        self._metrics.checkpointed.set(time.time())
        return CheckpointWritten(version, str(path))
