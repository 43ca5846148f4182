"""Writes the trainer's checkpoints, and tries again when the disk does not take one.

    step v ──► begin: copy of the state ──► step v + 1, ...
                        └──► samples on the disk ──► written ──► `outcome`: CheckpointWritten

One is written at a time. If another is due meanwhile, training waits for the first. With several
ranks, rank 0 decides and reports; each writes what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from asyncrl.config.by_step import ConfigByStep
from asyncrl.monitoring.records.spans import SpanKind
from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.checkpoint.checkpoint import Pending
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.learner import Learner
from asyncrl.trainer_process.checkpoint_writer import CheckpointWriter
from asyncrl.trainer_process.step_trainer import TrainerRecords
from asyncrl.wire.messages.from_trainer import CheckpointFailed, CheckpointWritten, StepFinished
from asyncrl.wire.records.step import TrainedStep

logger = logging.getLogger("asyncrl.trainer")

Outcome = CheckpointWritten | CheckpointFailed


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
        asynchronous: whether training continues while one is written, from a copy of the state.
    """

    def __init__(
        self,
        learner: Learner,
        directory: Path,
        *,
        every: int,
        limit_seconds: float,
        records: TrainerRecords,
        asynchronous: bool = True,
    ) -> None:
        self._learner = learner
        self._writer = CheckpointWriter(learner, limit_seconds=limit_seconds)
        self._directory = directory
        self._every: Callable[[int], int] = lambda _version: every
        self._asynchronous = asynchronous
        self._metrics = records.metrics
        self._timeline = records.timeline
        self._sample_log = records.samples
        self._saved_version = learner.policy_version
        self._failures = 0
        self._retry_at: int | None = None
        self._unsaved: list[TrainedStep] = []
        self._writing: asyncio.Task[None] | None = None
        self._outcomes: asyncio.Queue[Outcome | Exception | None] = asyncio.Queue()
        self._metrics.checkpoint_every.set(every)
        self._metrics.checkpointed.set(time.time())  # noqa: TID251 - for dashboards

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
                time=time.time(),  # noqa: TID251 - for the record of the step
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

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """What became of each checkpoint, until `close`.

        Raises:
            Superseded: another trainer was started in place of this one.
        """
        while (found := await self._outcomes.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    async def close(self) -> None:
        """Wait for the one that is being written, for as long as one may take; the last call."""
        await self._finish()
        self._outcomes.put_nowait(None)

    async def can_begin(self, *, ordered: bool = False) -> bool:
        """Whether the present version can be saved: it is not saved yet, and the disk answers.

        Waits for the one that is being written. If there is nothing to save and it was `ordered`,
        that is an outcome, too.
        """
        began = time.monotonic()
        await self._finish()
        self._metrics.checkpoint_blocked.inc(time.monotonic() - began)
        version = self._learner.policy_version
        path = path_of(self._directory, version)
        if version == self._saved_version:
            if ordered:
                self._report(CheckpointWritten(version, str(path)))
            return False
        try:
            self._writer.check(path)
        except CheckpointUnwritable as error:
            self._failed(version, error)
            return False
        return True

    async def begin(self) -> None:
        """Begin to save the present version, as rank 0 or as its peer. A collective.

        Waits until it is written if its state cannot be copied.
        """
        began, version = time.monotonic(), self._learner.policy_version
        with self._timeline.span(SpanKind.SAVING, version=version):
            await self._finish()
            pending = await asyncio.to_thread(self._learner.pending, copied=self._asynchronous)
            steps = tuple(self._unsaved)
            self._writing = asyncio.create_task(self._write(version, pending, steps))
            if not pending.is_copied:
                await self._finish()
        self._metrics.checkpoint_blocked.inc(time.monotonic() - began)

    async def _finish(self) -> None:
        """Wait until none is being written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def settle(self) -> None:
        """Wait until the state is copied, before weights or optimizer state change."""
        if self._writing is not None and not self._writing.done():
            seconds = await asyncio.to_thread(self._learner.settle)
            self._metrics.checkpoint_blocked.inc(seconds)

    async def _write(self, version: int, pending: Pending, steps: tuple[TrainedStep, ...]) -> None:
        path = path_of(self._directory, version)
        began = time.monotonic()
        try:
            if self._sample_log is not None:
                await self._sample_log.written()  # a resumed run does not train these steps again
            await self._writer.write(path, pending, steps)
        except CheckpointUnwritable as error:
            self._failed(version, error)
            return
        except Exception as error:  # noqa: BLE001 - raised where outcomes are waited for
            self._outcomes.put_nowait(error)
            return
        self._metrics.checkpoint_time.observe(time.monotonic() - began)
        self._saved_version, self._failures, self._retry_at = version, 0, None
        del self._unsaved[: len(steps)]
        self._metrics.unsaved.set(len(self._unsaved))
        self._metrics.checkpointed.set(time.time())  # noqa: TID251 - for dashboards
        self._report(CheckpointWritten(version, str(path)))

    def _failed(self, version: int, error: CheckpointUnwritable) -> None:
        self._failures += 1
        wait = min(2 ** (self._failures - 1), self._every(version))
        self._retry_at = version + wait
        self._metrics.checkpoints_failed.of(error.cause).inc()
        self._report(CheckpointFailed(version, error.cause, str(error), self._retry_at))

    def _report(self, outcome: Outcome) -> None:
        if self._learner.world.leads:
            self._outcomes.put_nowait(outcome)
        elif isinstance(outcome, CheckpointFailed):
            logger.warning("%s", outcome.reason)
