"""The thread that computes a core's steps, and what is done between two of them.

    thread = DecodeThread(core.step, may_step=lambda: core.has_work, deliver=..., failed=...)
    thread.post(lambda: core.interrupt("r1"), done=deliver, failed=end)  # before the next step
    scores = await thread.run(lambda: core.score(requests))

The core is not thread-safe, so nothing but this thread touches it. Steps follow each other without
a turn of the event loop in between: what a step reports is handed over while the next one is being
computed. Whatever is asked for during a step is done before the next one, in order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import TokenChunk

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """Work between two steps, and who hears of its end, in the event loop."""

    work: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]
    is_last: bool = False
    """The thread ends after it. It is done even if a step has failed."""


class DecodeThread:
    """Runs jobs and steps of one core. Made and called in one event loop.

    Args:
        step: computes a step and returns what it reports.
        may_step: whether there is anything to compute; called in the thread.
        deliver: gets what steps report, in the event loop.
        failed: is told in the event loop that a step raised. No other step follows, and jobs fail.
        prepare: called once in the thread.
    """

    def __init__(
        self,
        step: Callable[[], list[TokenChunk]],
        *,
        may_step: Callable[[], bool],
        deliver: Callable[[list[TokenChunk]], None],
        failed: Callable[[Exception], None],
        prepare: Callable[[], None],
    ) -> None:
        self._step = step
        self._may_step = may_step
        self._deliver = deliver
        self._failed = failed
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="torch-decode", daemon=True)
        self._thread.start()

    def post(
        self,
        work: Callable[[], T],
        *,
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Have work done between two steps; does not wait.

        Args:
            work: to be done in the thread.
            done: gets its result in the event loop, before anything that later steps report.
            failed: gets its error in the event loop.
        """
        self._add(_Job(work, done, failed))

    async def run(
        self,
        work: Callable[[], T],
        *,
        done: Callable[[T], None] | None = None,
        is_last: bool = False,
    ) -> T:
        """Do work between two steps and return its result. If cancelled, it is still done.

        Args:
            work: to be done in the thread.
            done: as in `post`. What later steps report may come before the caller resumes, so what
                must come before that is for `done`, not for the caller.
            is_last: the thread ends after it.
        """
        result: asyncio.Future[T] = self._loop.create_future()

        def resolve(value: T) -> None:
            if done is not None:
                done(value)
            if not result.done():
                result.set_result(value)

        def failed(error: Exception) -> None:
            if not result.done():
                result.set_exception(error)

        self._add(_Job(work, resolve, failed, is_last))
        return await result

    def wake(self) -> None:
        """Look again whether there is something to compute."""
        self._wake.set()

    async def close(self, last: Callable[[], list[TokenChunk]]) -> None:
        """End the thread after the running step and the jobs before; `last` is done even then.

        Args:
            last: what is done at the end, also after a step failed. Its chunks are delivered.
        """
        try:
            await self.run(last, done=self._deliver, is_last=True)
        finally:
            await asyncio.to_thread(self._thread.join)

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def _serve(self) -> None:
        self._prepare()
        while True:
            self._wake.clear()  # before looking: what comes from now on sets it again
            if self._do_jobs():
                return
            if self._failure is None and self._may_step():
                try:
                    chunks = self._step()
                except Exception as error:
                    logger.exception("the decode loop failed")
                    self._failure = error
                    self._tell(self._failed, error)
                else:
                    if chunks:
                        self._tell(self._deliver, chunks)
            elif not self._jobs:
                self._wake.wait()

    def _do_jobs(self) -> bool:
        """Do what has been asked for; True after the last job of all."""
        outcomes: list[tuple[Callable[[Any], None], Any]] = []
        ends = False
        while self._jobs and not ends:
            job = self._jobs.popleft()
            ends = job.is_last
            try:
                if self._failure is not None and not ends:
                    raise EngineError(f"the decode loop failed: {self._failure!r}")
                outcomes.append((job.done, job.work()))
            except Exception as error:  # noqa: BLE001 - whoever asked for it is told
                outcomes.append((job.failed, error))
        if outcomes:
            self._tell(_tell_all, outcomes)
        return ends

    def _tell(self, function: Callable[[Any], None], what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, what)
        except RuntimeError:  # the event loop has ended without `close`
            self._failure = self._failure or EngineError("the event loop has ended")


def _tell_all(outcomes: list[tuple[Callable[[Any], None], Any]]) -> None:
    for function, what in outcomes:
        function(what)
