"""Background tasks of a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger("asyncrl.generator")


class BackgroundTasks:
    """Tasks beside a process's loops. The first error of one, before `end`, ends the process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` concurrently."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.ended:
            logger.error("a task failed, so this process ends: %s", error)
            self._failure = error
            self._ended.set()

    @property
    def ended(self) -> bool:
        """True if the process must end."""
        return self._ended.is_set()

    def end(self) -> None:
        """End the process: `wait_for_end` returns."""
        self._ended.set()

    async def wait_for_end(self) -> None:
        """Wait for `end`, or for a task to fail."""
        await self._ended.wait()

    def cancel(self) -> None:
        """Cancel the running tasks."""
        for task in self._tasks:
            task.cancel()

    def raise_failure(self) -> None:
        """Raise the error of the task that ended the process, if one did."""
        if self._failure is not None:
            raise self._failure
