"""The pool of reward workers: bounded processes, bounded calls, errors that name the culprit."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from asyncrl.errors import RewardError, RewardFailed, RewardTimeout
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.loading import check_name
from asyncrl.rewards.process import WorkerProcess
from asyncrl.rewards.protocol import Call

log = logging.getLogger(__name__)


class RewardPool:
    """Scores responses in `config.workers` processes. Used from one asyncio event loop.

    Example:
        >>> pool = RewardPool(RewardConfig())
        >>> async def demo() -> float:
        ...     await pool.start()
        ...     try:
        ...         return await pool.score("2+3=?", "2+3+0=05:5", {"answer": "5"})
        ...     finally:
        ...         await pool.close()
        >>> asyncio.run(demo())
        1.0
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers = [WorkerProcess(config) for _ in range(config.workers)]
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        self._started = False
        self.waiting = 0
        """Calls that wait for a free worker now."""
        self.running = 0
        """Calls that a worker is busy with now."""
        self.scored = 0
        """Calls answered with a reward."""
        self.failed = 0
        """Calls that failed, those counted as zero included."""

    async def start(self) -> None:
        """Check the names and start every worker.

        Raises:
            RewardError: an unknown name, a file or module that is not there, a function that
                does not take the given arguments, or a module that fails while it is imported.
        """
        for function in self._config.functions:
            check_name(function.name)
        results = await asyncio.gather(
            *(worker.start() for worker in self._workers), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._started = True

    async def score(self, prompt: str, response: str, row: dict[str, Any]) -> float:
        """The weighted sum of all functions for one response; 0.0 on failure with `on_error: zero`.

        Raises:
            RewardTimeout: a function did not return in time.
            RewardFailed: a function raised, crashed, or returned no finite number.
            RewardError: the pool is not running, or a worker could not be started again.
        """
        worker = await self._acquire()
        self.running += 1
        try:
            value = await worker.score(Call(prompt, response, row))
        except (RewardTimeout, RewardFailed) as error:
            self.failed += 1
            if self._config.on_error == "stop":
                raise
            log.warning("counted as 0 (rewards.on_error: zero): %s", error)
            return 0.0
        finally:
            self.running -= 1
            self._idle.put_nowait(worker)
        self.scored += 1
        return value

    async def close(self) -> None:
        """Kill the workers; calls in progress fail. Idempotent."""
        self._started = False
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    async def _acquire(self) -> WorkerProcess:
        self._refuse_unless_started()
        self.waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self.waiting -= 1
        try:
            self._refuse_unless_started()
        except RewardError:
            self._idle.put_nowait(worker)  # the next waiting call must learn of it too
            raise
        return worker

    def _refuse_unless_started(self) -> None:
        if not self._started:
            raise RewardError("the reward pool is not running: not started yet, or closed")
