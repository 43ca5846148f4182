"""The pool of reward workers: bounded processes, bounded calls, errors that name the culprit.

Each worker has a loop here:

serve       consumes: calls, in order of arrival. produces: rewards, or what went wrong.
            waits for: calls, then the worker's answers. bounded by: `timeout_seconds` a call.

While calls are quick, a worker is sent many at once: an answer takes turns of the event loop, which
the engine leaves few of, and one call at a time would be one reward for some engine steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RewardError, RewardFailed, RewardTimeout
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.loading import check_name
from asyncrl.rewards.process import WorkerProcess
from asyncrl.rewards.protocol import Call

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 64
_QUICK_SECONDS = 0.002
"""A worker is sent several calls at once while its last one took less than this."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A call, and who waits for its reward."""

    call: Call
    reward: asyncio.Future[float]
    worker: WorkerProcess | None = None
    """Set while that worker computes it."""


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
        self._asked: deque[_Asked] = deque()
        self._some = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._taken = 0
        self.running = 0
        """Calls that a worker computes now."""
        self.scored = 0
        """Calls answered with a reward."""
        self.failed = 0
        """Calls that failed, those counted as zero included."""

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker now, those that were sent to one included."""
        return len(self._asked) + self._taken - self.running

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
        self._loops = [asyncio.create_task(self._serve(worker)) for worker in self._workers]

    async def score(self, prompt: str, response: str, example: dict[str, Any]) -> float:
        """The weighted sum of all functions for one response; 0.0 on failure with `on_error: zero`.

        Raises:
            RewardTimeout: a function did not return in time.
            RewardFailed: a function raised, crashed, or returned no finite number.
            RewardError: the pool is not running, or a worker could not be started again.
        """
        if not self._loops:
            raise _not_running()
        asked = _Asked(Call(prompt, response, example), asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self._some.set()
        try:
            value = await asked.reward
        except (RewardTimeout, RewardFailed) as error:
            self.failed += 1
            if self._config.on_error == "stop":
                raise
            log.warning("counted as 0 (rewards.on_error: zero): %s", error)
            return 0.0
        except asyncio.CancelledError:
            if asked.worker is not None:
                await asked.worker.kill()  # it may never return; calls behind it are served again
            raise
        self.scored += 1
        return value

    async def close(self) -> None:
        """Kill the workers; calls in progress fail. Idempotent."""
        loops, self._loops = self._loops, []
        for task in loops:
            task.cancel()
        if loops:
            await asyncio.wait(loops)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        for asked in self._asked:
            if not asked.reward.done():
                asked.reward.set_exception(_not_running())
        self._asked.clear()

    async def _serve(self, worker: WorkerProcess) -> None:
        """Hand calls to one worker, for ever."""
        at_once = 1
        while True:
            while not self._asked:
                self._some.clear()
                await self._some.wait()
            share = -(-len(self._asked) // len(self._workers))
            batch = [self._asked.popleft() for _ in range(min(share, at_once))]
            batch = [asked for asked in batch if not asked.reward.done()]
            if batch:
                seconds = await self._have_scored(worker, batch)
                at_once = _MOST_AT_ONCE if seconds < _QUICK_SECONDS else 1

    async def _have_scored(self, worker: WorkerProcess, batch: list[_Asked]) -> float:
        """Score a batch; what was not begun is queued again. Gives the longest call's seconds."""
        left, longest = deque(batch), 0.0
        self._taken += len(batch)
        self.running += 1
        left[0].worker = worker
        try:
            async with aclosing(worker.score([asked.call for asked in batch])) as answers:
                async for answer in answers:
                    asked = left.popleft()
                    self._taken -= 1
                    if isinstance(answer, RewardFailed):
                        _settle(asked, answer)
                    else:
                        _settle(asked, answer.value)
                        longest = max(longest, answer.seconds)
                    if left:
                        left[0].worker = worker
        except RewardError as error:
            self._taken -= 1
            _settle(left.popleft(), error)
            longest = _QUICK_SECONDS
        finally:
            self.running -= 1
            self._taken -= len(left)
            for asked in reversed(left):
                asked.worker = None
                self._asked.appendleft(asked)
        return longest


def _settle(asked: _Asked, result: float | RewardError) -> None:
    """Tell who waits; nobody does if the call was cancelled."""
    asked.worker = None
    with contextlib.suppress(asyncio.InvalidStateError):
        if isinstance(result, RewardError):
            asked.reward.set_exception(result)
        else:
            asked.reward.set_result(result)


def _not_running() -> RewardError:
    return RewardError("the reward pool is not running: not started yet, or closed")
