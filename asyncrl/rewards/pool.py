"""The pool of reward workers. Processes are bounded, calls are bounded, errors name the culprit.

Calls wait in one queue for the lanes (`asyncrl.user_code.pool`). A call whose process dies is
repeated in a new one, up to `max_attempts` times; a function that raises or hangs is not called
again.

A worker of sync functions gets new calls after it has answered all. While calls are quick, it gets
many at once: each answer takes turns of the event loop, of which the engine leaves only a few, so
one call at a time would give about one reward per engine step. A worker of async functions always
has up to `concurrency` calls.
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
from asyncrl.rewards.functions import check_name
from asyncrl.rewards.protocol import WHOLE_SUM, Began, Call, Failed, FromWorker, Scored
from asyncrl.rewards.values import ABSURD, BadValueError, as_float32
from asyncrl.user_code.pool import Lane, Pool, is_logged
from asyncrl.user_code.process import Program, WorkerLost, refusal
from asyncrl.user_code.streams import MAX_FRAME, Ready, pack
from asyncrl.wire.records.reward_counts import RewardCounts

log = logging.getLogger(__name__)

_MAX_BATCH = 64
"""Most calls that are sent to a worker at once."""
_QUICK_SECONDS = 0.002
"""A worker gets several calls at once while each call of its last batch took less than this."""
_MAX_LOST_BEFORE_BEGIN = 3
"""Number of processes that die with a call in their input until that counts as an attempt."""
_CANCEL_SECONDS = 1.0
"""Time for a worker of async functions to cancel an overdue call on its own."""


class RewardLane(Lane[RewardCall]):
    """Serves one worker process, from one event loop. All `lanes` share `calls`."""

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
        """Number of calls that the worker computes now."""
        return len(self.due) or min(1, len(self.sent))

    @property
    def call_seconds(self) -> float:
        """Time limit of a call in seconds."""
        extra = _CANCEL_SECONDS if self.process.loaded.asynchronous else 0.0
        return self._config.timeout_seconds + extra

    def _room(self) -> int:
        if self.process.loaded.asynchronous:
            return self._config.concurrency - len(self.sent)
        return 0 if self.sent else min(-(-len(self.queue) // self._config.workers), self._limit)

    def abandon(self, call: RewardCall) -> None:
        """Kill a sync function whose caller was cancelled: it may never return."""
        if call.number in self.due and not self.process.loaded.asynchronous:
            self.forget(call.number)
            self._abandoned = True
            self.process.terminate()

    def _take_in(self, message: Any) -> None:
        call = None
        if isinstance(message, Ready):  # a function has turned out to be async
            self.process.loaded = message
            return
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
        """Fail the call that takes too long; repeat the others."""
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
        """Offer the waiting calls to other lanes; fail them if no lane can start a process."""
        for lane in self._lanes:
            lane.feed()
        label = self._calls.label(0)
        while self.queue and all(lane.error is not None for lane in self._lanes):
            failed = RewardFailed(str(error), function=label, reason="not_loaded", unscored=True)
            self.queue.popleft().settle(failed)
        await super()._wait_to_start(error)

    def _computed(self) -> list[RewardCall]:
        """Return the calls that the worker computed last, or else the first that it received."""
        return [self.sent[number] for number in self.due] or list(self.sent.values())[:1]

    def return_sent(self) -> None:
        """Put the worker's calls back into the queue; none loses an attempt."""
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
        """Number of calls answered with a reward."""
        self._failures: Counter[tuple[str, str]] = Counter()
        self._largest: dict[str, float] = {}

    @property
    def has_functions(self) -> bool:
        """True if the configuration names functions; otherwise no process starts."""
        return bool(self._config.functions)

    @property
    def running(self) -> int:
        """Number of calls that workers compute now."""
        return sum(lane.running for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Number of calls that no worker has begun, including sent ones."""
        sent = sum(len(lane.sent) for lane in self._lanes)
        return len(self._queue.waiting) + sent - self.running

    @property
    def longest(self) -> tuple[str, float]:
        """Label of the function that has run longest, and its seconds; ("", 0) if none runs."""
        calls = [
            (due - lane.sent[number].seconds, lane.sent[number].term)
            for lane in self._lanes
            for number, due in lane.due.items()
            if number in lane.sent
        ]
        if not calls:
            return "", 0.0
        began, term = min(calls)
        return self._queue.label(term), max(0.0, time.monotonic() - began)

    @property
    def counts(self) -> RewardCounts:
        """Failures so far, including those that count as 0, and the use of servers."""
        failed: dict[str, dict[str, int]] = {}
        for (function, reason), count in self._failures.items():
            failed.setdefault(function, {})[reason] = count
        queue, largest = self._queue, dict(self._largest)
        return RewardCounts(
            failed=failed, retried=queue.retried, largest=largest, services=dict(queue.services)
        )

    async def start(self) -> None:
        """Check the names and start every worker.

        Raises RewardError if a function does not exist, cannot be imported or does not take the
        given arguments.
        """
        if not self.has_functions:
            return
        for function in self._config.functions:
            check_name(function.name)
        await super().start()

    async def score(
        self,
        prompt: str,
        response: str,
        example: dict[str, Any],
        *,
        example_id: str = "",
        is_beside_another: bool = False,
    ) -> Reward:
        """Return the weighted sum of all functions, or 0 after a failure with `on_error: zero`.

        `prompt` is the question as text; `asyncrl.rewards.values` describes `example`; `example_id`
        names it in errors. A function that returns None does not apply; all may do so only if the
        sample has another reward (`is_beside_another`). Raises RewardTimeout if a function does not
        return in time, RewardFailed if it raises, loses its process `max_attempts` times or does
        not return a number that is finite in float32, and RewardError if the pool is not running.
        """
        if not self._loops:
            raise _not_running()
        try:
            what = described(example_id, response)
            reward = await self._call(prompt, response, example, what)
            if not is_beside_another and all(one is None for one in reward.terms):
                raise self._queue.none_applies(what)
        except RewardFailed as error:
            self._failures[error.function, error.reason] += 1
            count = self._failures[error.function, error.reason]
            if self._config.on_error == "stop":
                raise
            if is_logged(count):
                log.warning("counted as 0 (rewards.on_error: zero), number %d: %s", count, error)
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
            text = f"{description} has {len(frame)} bytes, more than a worker reads ({MAX_FRAME})"
            raise RewardFailed(text, function=self._labels[0], reason="too_large")
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

    def _note_magnitude(self, reward: Reward) -> None:
        for label, value in zip(self._labels, reward.terms, strict=False):
            size = abs(value or 0.0)
            if size > ABSURD and size > self._largest.get(label, 0.0):
                if label not in self._largest:
                    text = "reward %r returned %g; rewards this large dominate every advantage"
                    log.warning(text, label, value)
                self._largest[label] = size


def _not_running() -> RewardError:
    return RewardError("the reward pool is not running: it has not been started, or it is closed")


def _program(config: RewardConfig) -> Program:
    terms = tuple(protocol.Term(one.name, one.weight, one.args) for one in config.functions)
    setup = pack(protocol.Setup(terms, str(Path.cwd()), config.timeout_seconds))
    command = (sys.executable, "-P", "-m", "asyncrl.rewards.worker")
    contents = f"the rewards ({', '.join(function.name for function in config.functions)}) were"
    limits = config.startup_seconds, config.max_processes, config.max_attempts
    return Program(command, "a reward worker", contents, setup, *limits)


def _check(message: FromWorker, functions: int) -> None:
    """Refuse impossible messages, since user code can write to its process's files.

    Raises WorkerLost for an unknown function or a reward that is not finite in float32.
    """
    if isinstance(message, Scored):
        try:
            for value in (message.value, *message.terms):
                if value is not None:
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
