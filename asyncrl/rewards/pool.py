"""The pool of reward workers. Processes are bounded, calls are bounded, errors name the culprit.

Each worker is served by one loop:

_serve      consumes: calls, in order of arrival. produces: rewards or errors.
            waits for: calls, then the worker's answers. bounded by: `timeout_seconds` per call.

While calls are quick, a worker is sent many at once. Each answer costs turns of the event loop, and
the engine leaves only a few of those, so one call at a time would yield about one reward per engine
step.
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

_MAX_BATCH = 64
"""Most calls that are sent to a worker at once."""
_QUICK_SECONDS = 0.002
"""A worker is sent several calls at once while each call of its last batch took less than this."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    """A call and the future that receives its reward."""

    call: Call
    reward: asyncio.Future[float]
    worker: WorkerProcess | None = None
    """The worker that is computing it, None while it waits."""


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
        self._queue: deque[_PendingCall] = deque()
        self._queue_filled = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._sent = 0
        self.running = 0
        """Calls that a worker is computing now."""
        self.scored = 0
        """Calls answered with a reward."""
        self.failed = 0
        """Calls that failed, including those counted as zero."""

    @property
    def waiting(self) -> int:
        """Calls that no worker has begun, including those already sent to one."""
        return len(self._queue) + self._sent - self.running

    async def start(self) -> None:
        """Check the names and start every worker.

        Raises:
            RewardError: an unknown name, a missing file or module, a function that does not take
                the given arguments, or a module that fails while it is imported.
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
            RewardError: the pool is not running, or a worker could not be restarted.
        """
        if not self._loops:
            raise _not_running()
        call = Call(prompt, response, example)
        pending = _PendingCall(call, asyncio.get_running_loop().create_future())
        self._queue.append(pending)
        self._queue_filled.set()
        try:
            value = await pending.reward
        except (RewardTimeout, RewardFailed) as error:
            self.failed += 1
            if self._config.on_error == "stop":
                raise
            log.warning("counted as 0 (rewards.on_error: zero): %s", error)
            return 0.0
        except asyncio.CancelledError:
            if pending.worker is not None:
                # The function may never return; a new process serves the calls behind it.
                await pending.worker.kill()
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
        for pending in self._queue:
            if not pending.reward.done():
                pending.reward.set_exception(_not_running())
        self._queue.clear()

    async def _serve(self, worker: WorkerProcess) -> None:
        """Pass calls to one worker until the task is cancelled."""
        limit = 1
        while True:
            while not self._queue:
                self._queue_filled.clear()
                await self._queue_filled.wait()
            share = -(-len(self._queue) // len(self._workers))
            batch = [self._queue.popleft() for _ in range(min(share, limit))]
            batch = [pending for pending in batch if not pending.reward.done()]
            if batch:
                seconds = await self._score_batch(worker, batch)
                limit = _MAX_BATCH if seconds < _QUICK_SECONDS else 1

    async def _score_batch(self, worker: WorkerProcess, batch: list[_PendingCall]) -> float:
        """Score a batch and requeue calls that were not begun. Returns the slowest's seconds."""
        remaining, slowest = deque(batch), 0.0
        self._sent += len(batch)
        self.running += 1
        remaining[0].worker = worker
        try:
            async with aclosing(worker.score([pending.call for pending in batch])) as answers:
                async for answer in answers:
                    pending = remaining.popleft()
                    self._sent -= 1
                    if isinstance(answer, RewardFailed):
                        _settle(pending, answer)
                    else:
                        _settle(pending, answer.value)
                        slowest = max(slowest, answer.seconds)
                    if remaining:
                        remaining[0].worker = worker
        except RewardError as error:
            self._sent -= 1
            _settle(remaining.popleft(), error)
            slowest = _QUICK_SECONDS
        finally:
            self.running -= 1
            self._sent -= len(remaining)
            for pending in reversed(remaining):
                pending.worker = None
                self._queue.appendleft(pending)
        return slowest


def _settle(pending: _PendingCall, result: float | RewardError) -> None:
    """Give the caller its result. A call that was cancelled has no caller any more."""
    pending.worker = None
    with contextlib.suppress(asyncio.InvalidStateError):
        if isinstance(result, RewardError):
            pending.reward.set_exception(result)
        else:
            pending.reward.set_result(result)


def _not_running() -> RewardError:
    return RewardError("the reward pool is not running: it was not started yet, or it is closed")
