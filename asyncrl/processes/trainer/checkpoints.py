"""Writes the trainer's checkpoints."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from asyncrl.processes.trainer.step_trainer import TrainerRecords
from monitoring.spans import SpanKind
from trainer.learner import Learner
from wire.messages.from_trainer import CheckpointWritten


class Checkpoints:
    """Saves the learner to `DIRECTORY/step-NNNNNN`, each version at most once.

    Args:
        learner: at the version that it was loaded or resumed from, which is not saved again.
        directory: of all checkpoints of the run.
        every: steps between two checkpoints.
        records: metrics and the time line.
    """

    def __init__(
        self, learner: Learner, directory: Path, *, every: int, records: TrainerRecords
    ) -> None:
        self._learner = learner
        self._directory = directory
        self._every = every
        self._metrics = records.metrics
        self._timeline = records.timeline
        self._sample_log = records.samples
        self._saved_version = learner.policy_version

    async def save_if_due(self) -> CheckpointWritten | None:
        """Save every so many steps; None if the present version is not due."""
        return None if self._learner.policy_version % self._every else await self.save()

    async def save(self) -> CheckpointWritten | None:
        """Save the present version; None if it is saved already. Raises CheckpointError."""
        version = self._learner.policy_version
        if version == self._saved_version:
            return None
        if self._sample_log is not None:
            await self._sample_log.written()  # a resumed run does not train these steps again
        path = self._directory / f"step-{version:06d}"
        began = time.monotonic()
        with self._timeline.span(SpanKind.SAVING, version=version):
            await asyncio.to_thread(self._learner.save, path)
        self._metrics.checkpoint_time.observe(time.monotonic() - began)
        self._saved_version = version
        return CheckpointWritten(version, str(path))
