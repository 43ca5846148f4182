"""A generator's background tasks, and its connection to the controller."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from asyncrl.errors import UserError
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Line
from asyncrl.wire.messages import from_generator, to_generator

logger = logging.getLogger("asyncrl.generator")


@dataclass(frozen=True, slots=True)
class ControllerLine:
    """The socket to the controller, and the name under which this generator sends."""

    generator: str
    line: Line[to_generator.ToGenerator]

    async def send(
        self, message: from_generator.FromGenerator, *, urgent: bool | None = None
    ) -> None:
        """Queue a message, by default urgent by its type. Raises Unreachable if too many wait."""
        self.line.send_soon(message, urgent=urgent)

    async def receive(self) -> to_generator.ToGenerator:
        """Wait for the next command."""
        return await self.line.receive()

    async def report_failed_sample(self, sample: SampleId, error: Exception) -> None:
        """Report and log why a sample cannot be generated or rewarded."""
        logger.error("sample %s failed: %s", sample, error)
        by_user = isinstance(error, UserError)
        await self.send(from_generator.SampleFailed(self.generator, sample, str(error), by_user))


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
