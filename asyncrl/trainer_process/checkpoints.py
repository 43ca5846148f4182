"""Writes the trainer's checkpoints in a thread, and retries if the disk refuses one.

    step v ──► begin: copy of the state ──► step v + 1, ...
                        └──► samples on the disk ──► written ──► `outcome`: CheckpointWritten

One is written at a time. If another becomes due, training waits for the first. With several ranks,
rank 0 decides and reports; each writes what it holds.

A write that exceeds its limit is given up: training continues, and no other checkpoint begins until
the disk has answered. What was written is removed, never renamed into place: without a copy of the
state, the thread reads weights that training changes.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.by_step import ConfigByStep
from asyncrl.monitoring.records.spans import SpanKind
from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.checkpoint.checkpoint import Pending
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.learner import Learner
from asyncrl.trainer_process.step_trainer import TrainerRecords
from asyncrl.wire.messages.from_trainer import CheckpointFailed, CheckpointWritten, StepFinished
from asyncrl.wire.records.step import TrainedStep

logger = logging.getLogger("asyncrl.trainer")

_PIECE_SECONDS = 0.5
"""Time in which the process was suspended does not count: the limit is counted in such pieces."""
Outcome = CheckpointWritten | CheckpointFailed


class _Writing(NamedTuple):
    path: Path
    began: float
    ended: concurrent.futures.Future[None]
    given_up: threading.Event


class CheckpointWriter:
    """Writes one checkpoint of the learner at a time, each within `limit_seconds`."""

    def __init__(self, learner: Learner, *, limit_seconds: float) -> None:
        self._learner = learner
        self.limit_seconds = limit_seconds
        self._hanging: _Writing | None = None

    def check(self, path: Path) -> None:
        """Raise CheckpointUnwritable if the disk is silent since a checkpoint was given up."""
        hanging = self._hanging
        if hanging is not None and not hanging.ended.done():
            raise _unanswered(path, hanging)

    async def write(self, path: Path, pending: Pending, steps: Sequence[TrainedStep]) -> None:
        """Write a checkpoint. Raises CheckpointUnwritable if the disk refuses it or hangs."""
        self.check(path)
        writing = _Writing(path, time.monotonic(), concurrent.futures.Future(), threading.Event())
        # A daemon: a thread that hangs must not keep the process from ending.
        work = (writing, pending, tuple(steps))
        threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True).start()
        ended, waited = asyncio.wrap_future(writing.ended), 0.0
        while waited < self.limit_seconds:
            piece, began = min(_PIECE_SECONDS, self.limit_seconds - waited), time.monotonic()
            if (await asyncio.wait({ended}, timeout=piece))[0]:
                return ended.result()
            waited += min(piece, time.monotonic() - began)
        writing.given_up.set()
        ended.add_done_callback(_note_late_end)
        self._hanging = writing
        raise _unanswered(path, writing)

    def _write(self, writing: _Writing, pending: Pending, steps: Sequence[TrainedStep]) -> None:
        try:
            self._learner.write(pending, writing.path, steps, writing.given_up)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            writing.ended.set_exception(error)
        else:
            writing.ended.set_result(None)


def _note_late_end(ended: asyncio.Future[None]) -> None:
    """Retrieve the error of a late answer, which is awaited nowhere else."""
    if not ended.cancelled():
        how = ended.exception() or "it is written"
        logger.info("the disk has answered for a checkpoint that was given up: %s", how)


def _unanswered(path: Path, hanging: _Writing) -> CheckpointUnwritable:
    seconds = time.monotonic() - hanging.began
    what = "it" if hanging.path == path else str(hanging.path)
    return CheckpointUnwritable(
        f"the checkpoint {path} cannot be written: the disk has not finished writing {what} for "
        f"{seconds:.0f} s (launcher.checkpoint_seconds)",
        "hanging",
    )


class Checkpoints:
    """Saves the learner to `DIRECTORY/step-NNNNNN`, each version at most once.

    If the disk refuses a checkpoint or does not answer for `limit_seconds`, training continues. It
    is retried after 1, 2, 4, ... steps, at most `every` apart, and whenever one is due.
    `asynchronous`: training continues while one is written, from a copy of the state.
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
        """Apply the user's changes."""
        self._every = lambda version: config.at(version).trainer.checkpoint_every
        self._writer.limit_seconds = config.whole.launcher.checkpoint_seconds
        self._metrics.checkpoint_every.set(self._every(self._learner.policy_version))

    def finished(self, step: StepFinished) -> None:
        """Note a step, which the next checkpoint will contain."""
        now = time.time()  # noqa: TID251 - for the record of the step
        self._unsaved.append(
            TrainedStep(
                step=step.step, time=now, groups=step.groups, metrics=step.metrics, times=step.times
            )
        )
        self._metrics.unsaved.set(len(self._unsaved))

    @property
    def is_due(self) -> bool:
        """True if the current version is a multiple of the interval, or a retry is due."""
        version = self._learner.policy_version
        is_retry = self._retry_at is not None and version >= self._retry_at
        return is_retry or version % self._every(version) == 0

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """Yield the outcome of each checkpoint, until `close`. Raises Superseded."""
        while (found := await self._outcomes.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    async def close(self) -> None:
        """Wait for the one being written, for as long as one may take; the last call."""
        await self._finish()
        self._outcomes.put_nowait(None)

    async def can_begin(self, *, ordered: bool = False) -> bool:
        """Return True if the current version is not saved yet, and the disk answers.

        Waits for the one being written. An `ordered` one is reported even without anything to save.
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
        """Begin to save the current version, as rank 0 or as its peer. Collective.

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
