"""The pool of reward workers. Processes are bounded, calls are bounded, errors name the culprit.

Calls wait in one queue for the lanes (`asyncrl.user_code.pool`). A call whose process dies is
repeated in a new one, up to `max_attempts` times; a function that raises or hangs is not called
again.

A worker of ordinary functions gets calls when it has none. While calls are quick it is sent many at
once: each answer costs turns of the event loop, and the engine leaves only a few of those, so one
call at a time would yield about one reward per engine step. A worker of async functions is kept at
`concurrency` calls.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import RewardError, RewardFailed
from asyncrl.rewards import protocol
from asyncrl.rewards.calls import CallQueue, Reward, RewardCall, described
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.loading import check_name
from asyncrl.rewards.protocol import WHOLE_SUM, Began, Call, Failed, FromWorker, Scored
from asyncrl.rewards.values import ABSURD, BadValueError, as_float32
from asyncrl.user_code.pool import Lane, Pool, is_logged
from asyncrl.user_code.process import Program, WorkerLost, refusal
from asyncrl.user_code.streams import MAX_FRAME, pack
from asyncrl.wire.records.reward_counts import RewardCounts

log = logging.getLogger(__name__)

_MAX_BATCH = 64
"""Most calls that are sent to a worker at once."""
_QUICK_SECONDS = 0.002
"""A worker is sent several calls at once while each call of its last batch took less than this."""
_MAX_LOST_BEFORE_BEGIN = 3
"""Processes that may die with a call in their input before that counts as an attempt."""
_CANCEL_SECONDS = 1.0
"""Time for a worker of async functions to cancel a call that is overdue by itself."""


class RewardLane(Lane[RewardCall]):
    """Serves one worker process. Used from one event loop.

    Args:
        calls: shared by all lanes.
        lanes: all of them.
    """

    def __init__(self, calls: CallQueue, lanes: Sequence[RewardLane]) -> None:
        super().__init__(_program(calls.config), FromWorker, calls.waiting)
        self._config = calls.config
        self._calls = calls
        self._lanes = lanes
        self._limit = 1
        self._slowest = 0.0
        self._abandoned = False

    @property
    def running(self) -> int:
        """Calls that the worker is computing."""
        return len(self.due) or min(1, len(self.sent))

    @property
    def call_seconds(self) -> float:
        """Time limit of a call."""
        extra = _CANCEL_SECONDS if self.process.loaded.asynchronous else 0.0
        return self._config.timeout_seconds + extra

    def _room(self) -> int:
        if self.process.loaded.asynchronous:
            return self._config.concurrency - len(self.sent)
        return 0 if self.sent else min(-(-len(self.queue) // self._config.workers), self._limit)

    def abandon(self, call: RewardCall) -> None:
        """The caller was cancelled. A function that is not async may never return: kill it."""
        if call.number in self.due and not self.process.loaded.asynchronous:
            self.forget(call.number)
            self._abandoned = True
            self.process.terminate()

    def _take_in(self, message: Any) -> None:
        call = None
        if isinstance(message, FromWorker):
            _check(message, len(self._config.functions))
            call = self.sent.get(message.call)
        if call is None:
            raise refusal(f"{type(message).__name__} for a call that it does not have")
        if isinstance(message, Began):
            self.due.setdefault(call.number, time.monotonic() + call.seconds)
            call.term = message.term
            return
        self.forget(call.number)
        self._calls.note_uses(message.uses)
        if isinstance(message, Scored):
            self._slowest = max(self._slowest, message.seconds)
            call.settle(Reward(message.value, message.terms))
        else:
            call.settle(self._calls.failed(call, message))
        if not self.sent:
            self._limit = _MAX_BATCH if self._slowest < _QUICK_SECONDS else 1
            self._slowest = 0.0

    def _give_up_overdue(self) -> None:
        """The call that takes too long fails; the others are repeated."""
        computed = [] if self._abandoned else self._computed()  # else it is being killed
        for call in computed:
            self.forget(call.number)
        self.return_sent()
        if len(computed) == 1:
            computed[0].settle(self._calls.overdue(computed[0]))
        else:  # one of them blocks the worker
            self._calls.repeat_alone(computed)

    def _lose(self, lost: WorkerLost) -> None:
        victims: list[RewardCall] = []
        if not self._abandoned:
            log.warning("the process of a reward worker %s", str(lost).partition("\n")[0])
            victims = self._computed()
        if victims and not self.due and not lost.too_many:
            victims[0].lost_before_begin += 1
            if victims[0].lost_before_begin < _MAX_LOST_BEFORE_BEGIN:
                victims = []
        for call in victims:
            self.forget(call.number)
        self.return_sent()
        self._calls.process_died(victims, lost)

    async def _wait_to_start(self, error: RewardError) -> None:
        """While no lane can start a process, calls fail; others get those that were put back."""
        for lane in self._lanes:
            lane.feed()
        calls = [] if any(lane.ready for lane in self._lanes) else self.take(1)
        if not calls:
            await super()._wait_to_start(error)
        for call in calls:
            label = self._calls.label(0)
            call.settle(
                RewardFailed(str(error), function=label, reason="not_loaded", unscored=True)
            )

    def _computed(self) -> list[RewardCall]:
        """The calls that the worker was computing, or else the first that it was sent."""
        return [self.sent[number] for number in self.due] or list(self.sent.values())[:1]

    def return_sent(self) -> None:
        """Return the calls that the worker has to the queue; none loses an attempt."""
        self._calls.put_back(self.sent.values())
        self.sent.clear()
        self.due.clear()
        self._limit, self._slowest, self._abandoned = 1, 0.0, False


class RewardPool(Pool[RewardLane]):
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
        lanes: list[RewardLane] = []
        lanes += [RewardLane(self._queue, lanes) for _ in range(config.workers)]
        super().__init__(lanes)
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
        sent = sum(len(lane.sent) for lane in self._lanes)
        return len(self._queue.waiting) + sent - self.running

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
        await super().start()

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

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Kill the workers; calls in progress fail. Idempotent."""
        await super().close(grace_seconds)
        for lane in self._lanes:
            lane.return_sent()
        for call in self._queue.waiting:
            call.settle(_not_running())
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
        seconds = self._lanes[0].call_seconds
        call = RewardCall(number, frame, seconds, future, description=description)
        self._queue.waiting.append(call)
        for lane in sorted(self._lanes, key=lambda lane: len(lane.sent)):
            lane.feed()
        try:
            return await future
        except asyncio.CancelledError:
            for lane in self._lanes:
                lane.abandon(call)
            raise

    def _log_failure(self, error: RewardFailed) -> None:
        """Log some of them: each may have a long traceback."""
        count = self._failures[error.function, error.reason]
        if is_logged(count):
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


def _program(config: RewardConfig) -> Program:
    terms = tuple(protocol.Term(one.name, one.weight, one.args) for one in config.functions)
    names = ", ".join(function.name for function in config.functions)
    return Program(
        (sys.executable, "-P", "-m", "asyncrl.rewards.worker"),
        "a reward worker",
        f"the rewards ({names}) were",
        pack(protocol.Setup(terms, str(Path.cwd()), config.timeout_seconds)),
        config.startup_seconds,
        config.max_processes,
        config.max_attempts,
    )


def _check(message: FromWorker, functions: int) -> None:
    """Refuse what no worker sends: the user's code can write to its process's files.

    Raises:
        WorkerLost: a function that does not exist, or a reward that is not finite in float32.
    """
    if isinstance(message, Scored):
        try:
            for value in (message.value, *message.terms):
                as_float32(value)
        except BadValueError as error:
            raise refusal(f"a reward of {message.value}") from error
        if len(message.terms) != functions:
            raise refusal(f"{len(message.terms)} values for {functions} functions")
    elif not WHOLE_SUM <= message.term < functions:
        raise refusal(f"there is no function {message.term}")
    if isinstance(message, Scored | Failed):
        for use in message.uses:
            if not 0 <= use.term < functions or not math.isfinite(use.seconds):
                raise refusal(f"a use of a server by function {use.term}")
