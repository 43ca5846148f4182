"""One worker of the pool: calls go in, answers come out, a process that dies is replaced.

run         consumes: calls of the queue, the worker's answers. produces: rewards, failures,
            calls that are put back. waits for: calls, then the worker.
            bounded by: `timeout_seconds` per call, `startup_seconds` per start.

A worker of ordinary functions gets calls when it has none. While calls are quick it is sent many at
once: each answer costs turns of the event loop, and the engine leaves only a few of those, so one
call at a time would yield about one reward per engine step. A worker of async functions is kept at
`concurrency` calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from asyncrl.errors import RewardError
from asyncrl.rewards.calls import CallQueue, PendingCall, Reward
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.process import WorkerLost, WorkerProcess, refused
from asyncrl.rewards.protocol import WHOLE_SUM, Began, Failed, FromWorker, Scored
from asyncrl.rewards.values import BadValueError, as_float32
from asyncrl.wire.transport.decoding import FrameRefused, Reason

log = logging.getLogger(__name__)

_MAX_BATCH = 64
"""Most calls that are sent to a worker at once."""
_QUICK_SECONDS = 0.002
"""A worker is sent several calls at once while each call of its last batch took less than this."""
_LATE_SECONDS = 0.05
"""A last look at the worker's answers before a call is overdue: the event loop may have been busy
while they came."""
_RETRY_SECONDS = 1.0
"""Time between two starts of a process that could not be started, while other lanes work."""
_MAX_LOST_BEFORE_BEGIN = 3
"""Processes that may die with a call in their input before that counts as an attempt."""
_SUSPENDED_SECONDS = 1.0
"""A wait that ends this much too late means that this process, and perhaps the worker, was
suspended."""
_MAX_FORGOTTEN_WAITS = 3
"""In a row: an event loop that is late again and again is busy."""
_CANCEL_SECONDS = 1.0
"""Time for a worker of async functions to cancel a call that is overdue by itself."""


class Lane:
    """Serves one worker process. Used from one event loop.

    Args:
        config: of the rewards.
        queue: shared by all lanes.
        lanes: how many there are.
    """

    def __init__(self, config: RewardConfig, queue: CallQueue, lanes: int) -> None:
        self._config = config
        self._queue = queue
        self._lanes = lanes
        self._worker = WorkerProcess(config)
        self._sent: dict[int, PendingCall] = {}
        self._began: dict[int, float] = {}
        self._term: dict[int, int] = {}
        self._heard = 0.0
        self._forgotten_waits = 0
        self._limit = 1
        self._slowest = 0.0
        self._ready = False
        self._abandoned = False
        self._patience: asyncio.Timeout | None = None

    @property
    def sent(self) -> int:
        """Calls that the worker has and has not answered."""
        return len(self._sent)

    @property
    def running(self) -> int:
        """Calls that the worker is computing."""
        return len(self._began) or min(1, len(self._sent))

    async def start(self) -> None:
        """Start the worker; again if its process dies meanwhile.

        Raises:
            RewardError: the functions cannot be loaded, or the process died at every attempt.
        """
        for attempt in range(1, self._config.max_attempts + 1):
            try:
                await self._worker.start()
            except WorkerLost as error:
                if attempt == self._config.max_attempts:
                    raise
                log.warning("a reward worker is started again: %s", error)
            else:
                self._set_ready(True)
                return

    def _set_ready(self, ready: bool) -> None:
        self._queue.lanes_ready += ready - self._ready
        self._ready = ready

    def feed(self) -> None:
        """Send waiting calls if the worker has room for them."""
        if not self._ready or any(pending.alone for pending in self._sent.values()):
            return
        if self._worker.asynchronous:
            room = self._config.concurrency - len(self._sent)
            if self._sent and self._queue.waiting and self._queue.waiting[0].alone:
                return
        else:
            share = -(-len(self._queue.waiting) // self._lanes)
            room = 0 if self._sent else min(share, self._limit)
        calls = self._queue.take(room)
        if calls:
            was_idle = not self._sent
            self._sent |= {pending.number: pending for pending in calls}
            self._worker.send(pending.frame for pending in calls)
            if was_idle:
                self._heard = time.monotonic()
                if self._patience is not None:  # `_serve` already waits for the worker
                    loop = asyncio.get_running_loop()
                    self._patience.reschedule(loop.time() + self._seconds_left())

    def abandon(self, pending: PendingCall) -> None:
        """The caller was cancelled. A function that is not async may never return: kill it."""
        if pending.number in self._began and not self._worker.asynchronous:
            self._forget(pending.number)
            self._abandoned = True
            self._worker.terminate()

    async def run(self) -> None:
        """Serve until cancelled. The worker has been started."""
        while True:
            try:
                await self._serve()
            except WorkerLost as lost:
                self._set_ready(False)
                self._note_loss(lost)
            await self._restart()

    async def close(self) -> list[PendingCall]:
        """Kill the worker; returns the calls that it had."""
        self._set_ready(False)
        await self._worker.kill()
        calls = list(self._sent.values())
        self._clear()
        return calls

    async def _serve(self) -> None:
        """Feed the worker and settle what it answers. Raises WorkerLost."""
        while True:
            self.feed()
            messages = await self._messages(self._seconds_left() if self._sent else None)
            if not messages and self._is_overdue():
                messages = await self._messages(_LATE_SECONDS)
                if not messages and self._is_overdue():
                    await self._give_up_overdue()
                    return
            for message in messages:
                self._handle(message)

    async def _messages(self, seconds: float | None) -> list[FromWorker]:
        """What the worker sends next; nothing if it sends nothing in time. Raises WorkerLost.

        `None` waits without limit; `feed` sets one when it sends a call.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(seconds) as patience:
                self._patience = patience if seconds is None else None
                messages = await self._worker.receive()
        except TimeoutError:
            now = loop.time()
            late = now - (patience.when() or now)
            if late > _SUSPENDED_SECONDS and self._forgotten_waits < _MAX_FORGOTTEN_WAITS:
                self._forget_wait(now - began)
            return []
        finally:
            self._patience = None
        self._heard, self._forgotten_waits = time.monotonic(), 0
        return messages

    def _forget_wait(self, seconds: float) -> None:
        """Give every call the time of a wait again: nobody knows when in it the worker ran."""
        self._forgotten_waits += 1
        self._heard += seconds
        for number in self._began:
            self._began[number] += seconds

    def _is_overdue(self) -> bool:
        return bool(self._sent) and self._seconds_left() <= 0

    def _seconds_left(self) -> float:
        """Until the first call is overdue; a call that was not begun counts from the last sign."""
        since = min(self._began.values(), default=self._heard)
        limit = self._config.timeout_seconds
        if self._worker.asynchronous:
            limit += _CANCEL_SECONDS
        return since + limit - time.monotonic()

    def _handle(self, message: FromWorker) -> None:
        """Take in an answer. Raises WorkerLost if it answers nothing that was sent."""
        pending = None
        if isinstance(message, Began | Scored | Failed):
            _check(message, len(self._config.functions))
            pending = self._sent.get(message.call)
        if pending is None:
            name = type(message).__name__
            raise _refusal(f"{name} for a call that it does not have")
        if isinstance(message, Began):
            self._began.setdefault(pending.number, time.monotonic())
            self._term[pending.number] = message.term
            return
        self._forget(pending.number)
        if isinstance(message, Scored):
            self._queue.note_uses(message.uses)
            self._slowest = max(self._slowest, message.seconds)
            pending.settle(Reward(message.value, message.terms))
        elif isinstance(message, Failed):
            pending.settle(self._queue.failed(pending, message))
        if not self._sent:
            self._limit = _MAX_BATCH if self._slowest < _QUICK_SECONDS else 1
            self._slowest = 0.0

    def _forget(self, number: int) -> None:
        for of_calls in (self._sent, self._began, self._term):
            of_calls.pop(number, None)

    def _clear(self) -> None:
        for of_calls in (self._sent, self._began, self._term):
            of_calls.clear()
        self._limit, self._slowest, self._abandoned = 1, 0.0, False

    def _computed(self) -> list[PendingCall]:
        """The calls that the worker was computing, or else the first that it was sent."""
        calls = [self._sent[number] for number in self._began]
        return calls or list(self._sent.values())[:1]

    async def _give_up_overdue(self) -> None:
        """Fail the call that takes too long and kill the worker; the others are repeated."""
        self._set_ready(False)
        computed, terms = self._computed(), dict(self._term)
        for pending in computed:
            self._forget(pending.number)
        self._return_sent()
        if len(computed) == 1:
            computed[0].settle(self._queue.overdue(computed[0], terms.get(computed[0].number, 0)))
        else:  # one of them blocks the worker
            self._queue.repeat_alone(computed)
        await self._worker.kill()

    def _note_loss(self, lost: WorkerLost) -> None:
        """Repeat the calls that the worker had, or fail them."""
        if self._abandoned:
            self._return_sent()
            return
        log.warning("the process of a reward worker %s", str(lost).partition("\n")[0])
        victims = self._computed()
        if lost.too_many and len(victims) == 1:
            self._queue.too_many_processes(victims[0], self._term, str(lost))
            self._return_sent()
        else:
            self._put_back(str(lost))

    def _return_sent(self) -> None:
        """Return the calls that the worker has to the queue; none loses an attempt."""
        self._queue.put_back(self._sent.values())
        self._clear()

    def _put_back(self, how: str) -> None:
        """Return the calls of a lost worker to the queue; those in progress lose an attempt."""
        victims = [self._sent[number] for number in self._began]
        others = [one for one in self._sent.values() if one.number not in self._began]
        if not victims and others:
            others[0].lost_before_begin += 1
            if others[0].lost_before_begin >= _MAX_LOST_BEFORE_BEGIN:
                victims.append(others.pop(0))
        self._queue.put_back(others)
        self._queue.process_died(victims, self._term, how)
        self._clear()

    async def _restart(self) -> None:
        """Start a new process. While no lane can start one, calls fail."""
        while True:
            try:
                await self.start()
            except RewardError as error:
                log.error("a reward worker cannot be started again: %s", error)
                if self._queue.lanes_ready:
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    await self._queue.fail_next(error)
            else:
                return


def _check(message: Began | Scored | Failed, functions: int) -> None:
    """Refuse what no worker sends: the user's code can write to its process's files.

    Raises:
        WorkerLost: a function that does not exist, or a reward that is not finite in float32.
    """
    if isinstance(message, Scored):
        try:
            for value in (message.value, *message.terms):
                as_float32(value)
        except BadValueError as error:
            raise _refusal(f"a reward of {message.value}") from error
        if len(message.terms) != functions:
            raise _refusal(f"{len(message.terms)} values for {functions} functions")
    elif not WHOLE_SUM <= message.term < functions:
        raise _refusal(f"there is no function {message.term}")
    if isinstance(message, Scored | Failed):
        for use in message.uses:
            if not 0 <= use.term < functions or not math.isfinite(use.seconds):
                raise _refusal(f"a use of a server by function {use.term}")


def _refusal(text: str) -> WorkerLost:
    return refused(FrameRefused(Reason.UNEXPECTED, text))
