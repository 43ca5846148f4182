"""Writes checkpoints in a thread, and gives up on a disk that hangs.

    write ──► thread: Learner.write ──► renamed ──► `write` returns
                 │ not within the limit
                 └──► given up: `write` raises, training continues. If the disk ever answers, the
                      thread removes what it has written. Until then no other checkpoint is begun.

Without a copy of the state, the thread reads the weights that training changes afterwards. So a
checkpoint that was given up never gets its name: `trainer.checkpoint.checkpoint` looks at
`given_up` when all bytes are on the disk.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.checkpoint.checkpoint import Pending
from asyncrl.trainer.learner import Learner
from asyncrl.wire.records.step import TrainedStep

logger = logging.getLogger("asyncrl.trainer")

_PIECE_SECONDS = 0.5
"""The limit is counted in pieces, so that time in which the process was suspended does not."""


class _Writing(NamedTuple):
    """A checkpoint that a thread is writing."""

    path: Path
    began: float
    ended: concurrent.futures.Future[None]
    given_up: threading.Event


class CheckpointWriter:
    """Writes one checkpoint at a time.

    Args:
        learner: is saved.
        limit_seconds: longest time for one checkpoint.
    """

    def __init__(self, learner: Learner, *, limit_seconds: float) -> None:
        self._learner = learner
        self.limit_seconds = limit_seconds
        self._hanging: _Writing | None = None

    def check(self, path: Path) -> None:
        """Whether a checkpoint may be begun.

        Raises:
            CheckpointUnwritable: the disk has not answered since one was given up.
        """
        hanging = self._hanging
        if hanging is not None and not hanging.ended.done():
            raise _unanswered(path, hanging)

    async def write(self, path: Path, pending: Pending, steps: Sequence[TrainedStep]) -> None:
        """Write a pending checkpoint.

        Raises:
            CheckpointUnwritable: the disk does not take it, or does not answer.
        """
        self.check(path)
        writing = _Writing(path, time.monotonic(), concurrent.futures.Future(), threading.Event())
        # A daemon: a thread that hangs must not keep the process from ending.
        threading.Thread(
            target=self._write,
            args=(writing, pending, tuple(steps)),
            name="checkpoint",
            daemon=True,
        ).start()
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
    """The disk has answered after all. Nobody awaits the error, so it is retrieved here."""
    if not ended.cancelled():
        logger.info("a checkpoint that was given up has ended: %s", ended.exception())


def _unanswered(path: Path, hanging: _Writing) -> CheckpointUnwritable:
    seconds = time.monotonic() - hanging.began
    what = "it" if hanging.path == path else str(hanging.path)
    return CheckpointUnwritable(
        f"the checkpoint {path} cannot be written: the disk has not finished writing {what} for "
        f"{seconds:.0f} s (launcher.checkpoint_seconds)",
        "hanging",
    )
