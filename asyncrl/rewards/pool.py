"""The pool of reward workers. Processes are bounded, calls are bounded, errors name the culprit.

    score ──► CallQueue ──► Lane ──► WorkerProcess ══► supervisor ──► worker: the user's functions

Calls wait in one queue. Each lane serves one worker process and replaces it when it dies. A call
whose process dies is repeated in a new one, up to `max_attempts` times; a function that raises or
hangs is not called again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from typing import Any

from asyncrl.errors import RewardError, RewardFailed
from asyncrl.rewards.calls import CallQueue, PendingCall, Reward, described
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.lane import Lane
from asyncrl.rewards.loading import check_name
from asyncrl.rewards.protocol import Call
from asyncrl.rewards.values import ABSURD
from asyncrl.user_code.streams import MAX_FRAME, pack
from asyncrl.wire.records.reward_counts import RewardCounts

log = logging.getLogger(__name__)

_LOGGED_FAILURES = 10
"""Failures of each function and reason that are logged one by one."""


class RewardPool:
    """Scores responses in `config.workers` processes. Used from one asyncio event loop.

    Example:
        >>> pool = RewardPool(RewardConfig())
        >>> async def demo() -> Reward:
        ...     await pool.start()
        ...     try:
        ...         return await pool.score("2+3=?", "2+3+0=05:5", {"answer": "5"})
        ...     finally:
        ...         await pool.close()
        >>> asyncio.run(demo())
        Reward(value=1.0, terms=(1.0,), verdict='scored')
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._labels = config.labels
        self._queue = CallQueue(config)
        self._lanes = [Lane(config, self._queue, config.workers) for _ in range(config.workers)]
        self._loops: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self.scored = 0
        """Calls answered with a reward."""
        self._failures: Counter[tuple[str, str]] = Counter()
        self._largest: dict[str, float] = {}

    @property
    def has_functions(self) -> bool:
        """Whether there is anything to score with; without, nothing is started."""
        return bool(self._config.functions)

    @property
    def running(self) -> int:
        """Calls that workers are computing now."""
        return sum(lane.running for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Calls that no worker has begun, including those already sent to one."""
        return len(self._queue.waiting) + sum(lane.sent for lane in self._lanes) - self.running

    @property
    def counts(self) -> RewardCounts:
        """What went wrong so far, failures counted as zero included."""
        failed: dict[str, dict[str, int]] = {}
        for (function, reason), count in self._failures.items():
            failed.setdefault(function, {})[reason] = count
        return RewardCounts(
            failed=failed,
            retried=self._queue.retried,
            largest=dict(self._largest),
            services=dict(self._queue.services),
        )

    async def start(self) -> None:
        """Check the names and start every worker.

        Raises:
            RewardError: an unknown name, a missing file or module, a function that does not take
                the given arguments, or a module that fails while it is imported.
        """
        if not self.has_functions:
            return
        for function in self._config.functions:
            check_name(function.name)
        results = await asyncio.gather(
            *(lane.start() for lane in self._lanes), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result
        self._loops = [asyncio.create_task(lane.run()) for lane in self._lanes]

    async def score(
        self, prompt: str, response: str, example: dict[str, Any], *, example_id: str = ""
    ) -> Reward:
        """The weighted sum of all functions for one response; 0 on failure with `on_error: zero`.

        Args:
            prompt: the question as text.
            response: the model's response.
            example: see `asyncrl.rewards.values`.
            example_id: names the example in error messages.

        Raises:
            RewardTimeout: a function did not return in time.
            RewardFailed: a function raised, lost its process `max_attempts` times, or returned no
                number that is finite in float32.
            RewardError: the pool is not running.
        """
        if not self._loops:
            raise _not_running()
        try:
            reward = await self._call(prompt, response, example, described(example_id, response))
        except RewardFailed as error:
            self._failures[error.function, error.reason] += 1
            if self._config.on_error == "stop":
                raise
            self._log_failure(error)
            return Reward(0.0, verdict="unscored" if error.unscored else "failed")
        self.scored += 1
        self._note_magnitude(reward)
        return reward

    async def close(self) -> None:
        """Kill the workers; calls in progress fail. Idempotent."""
        loops, self._loops = self._loops, []
        for task in loops:
            task.cancel()
        if loops:
            await asyncio.wait(loops)
        left = await asyncio.gather(*(lane.close() for lane in self._lanes))
        for pending in itertools.chain(self._queue.waiting, *left):
            pending.settle(_not_running())
        self._queue.waiting.clear()

    async def _call(
        self, prompt: str, response: str, example: dict[str, Any], description: str
    ) -> Reward:
        number = next(self._numbers)
        frame = pack(Call(number, prompt, response, example))
        if len(frame) > MAX_FRAME:
            raise RewardFailed(
                f"{description} is larger than a reward worker can be sent "
                f"({len(frame)} bytes, at most {MAX_FRAME})",
                function=self._labels[0],
                reason="too_large",
            )
        future: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        pending = PendingCall(number, frame, description, future)
        self._queue.add(pending)
        for lane in sorted(self._lanes, key=lambda lane: lane.sent):
            lane.feed()
        try:
            return await future
        except asyncio.CancelledError:
            for lane in self._lanes:
                lane.abandon(pending)
            raise

    def _log_failure(self, error: RewardFailed) -> None:
        """Log the first failures of a kind, then the 2^n-th: each may have a long traceback."""
        count = self._failures[error.function, error.reason]
        if count <= _LOGGED_FAILURES or count.bit_count() == 1:
            log.warning("counted as 0 (rewards.on_error: zero), number %d: %s", count, error)

    def _note_magnitude(self, reward: Reward) -> None:
        for label, value in zip(self._labels, reward.terms, strict=False):
            size = abs(value)
            if size > ABSURD and size > self._largest.get(label, 0.0):
                if label not in self._largest:
                    log.warning(
                        "reward %r returned %g; rewards this large dominate every advantage",
                        label,
                        value,
                    )
                self._largest[label] = size


def _not_running() -> RewardError:
    return RewardError("the reward pool is not running: it was not started yet, or it is closed")
