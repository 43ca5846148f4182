"""A pool of processes that run user code: calls with deadlines, and lanes that send them.

    caller ──► PendingCall ──► Lane ──► UserProcess ══► supervisor ──► worker: the user's code

run         consumes: calls of the queue, the worker's answers. produces: answers, failures,
            calls that are put back. waits for: calls, then the worker.
            bounded by: the time limit of each call, `startup_seconds` per start.

A lane serves one process and replaces it when it ends. Its subclass decides which calls to send,
and handles calls that the process leaves unanswered: a reward's call is repeated (`rewards.pool`),
an environment's session is lost (`environments.workers.lane`).
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.errors import RewardError
from asyncrl.user_code.process import Program, UserProcess, WorkerLost

log = logging.getLogger(__name__)

_LATE_SECONDS = 0.05
"""Last wait for answers before a call is overdue, as this event loop may have been busy."""
_RETRY_SECONDS = 1.0
"""Pause after a failed start of a process."""
_SUSPENDED_SECONDS = 1.0
"""A wait this much too long shows that this process, and perhaps the worker, was suspended."""
_MAX_FORGOTTEN_WAITS = 3
"""Consecutive late waits that are excused; an event loop that is late more often is busy."""
_LOGGED = 10
"""Events of each kind that are logged one by one."""


def is_logged(count: int) -> bool:
    """Return True for the first `_LOGGED` events of a kind, then for each 2^n-th."""
    return count <= _LOGGED or count.bit_count() == 1


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call and the future that receives its answer."""

    number: int
    """Unique within a pool; the worker's answers carry it."""
    frame: bytes
    seconds: float
    """Longest time from the call's beginning to its answer."""
    answer: asyncio.Future[Any]
    """Done also if the caller was cancelled."""
    alone: bool = False
    """True if no other call may run in its process at the same time."""

    def settle(self, result: object) -> None:
        """Set the answer; an exception is raised in the caller. Ignored if it was cancelled."""
        with contextlib.suppress(asyncio.InvalidStateError):
            if isinstance(result, Exception):
                self.answer.set_exception(result)
            else:
                self.answer.set_result(result)


C = TypeVar("C", bound=PendingCall)


class Lane(Generic[C]):
    """Serves one worker process of a program. Used from one event loop.

    `answers` is the union of the messages that the process sends; `queue` has the unsent calls, and
    lanes may share it.
    """

    def __init__(self, program: Program, answers: Any, queue: deque[C]) -> None:
        self.process = UserProcess(program, answers)
        self.queue = queue
        self.sent: dict[int, C] = {}
        """Unanswered calls of the process, by number."""
        self.due: dict[int, float] = {}
        """Times at which calls that have begun are overdue."""
        self.ready = False
        self.error: RewardError | None = None
        self.replaced = 0
        """Number of processes that have ended and were replaced."""
        self._heard = 0.0
        self._forgotten_waits = 0
        self._patience: asyncio.Timeout | None = None

    def _room(self) -> int:
        """Return how many calls may be sent now."""
        raise NotImplementedError

    def _note_sent(self, call: C) -> None:
        """Note that a call is sent now."""

    def _take_in(self, message: Any) -> None:
        """Take an answer. Raises WorkerLost if it belongs to no sent call."""
        raise NotImplementedError

    def _give_up_overdue(self) -> None:
        """Settle or put back every call, as one is overdue; the process is then replaced."""
        raise NotImplementedError

    def _lose(self, lost: WorkerLost) -> None:
        """Settle or put back every call: the process has ended."""
        raise NotImplementedError

    def _is_worn_out(self) -> bool:
        """Return True if the process must be replaced; then every call has been settled."""
        return False

    async def _wait_to_start(self, error: RewardError) -> None:
        """Wait after a failed start."""
        del error
        await asyncio.sleep(_RETRY_SECONDS)

    async def start(self) -> None:
        """Start the worker, again if it dies while it loads. Raises RewardError if that fails."""
        program = self.process.program
        for attempt in range(1, program.max_attempts + 1):
            try:
                await self.process.start()
            except WorkerLost as error:
                if attempt == program.max_attempts:
                    raise
                log.warning("%s is started again: %s", program.title, error)
            else:
                self.ready, self.error = True, None
                return

    def feed(self) -> None:
        """Send waiting calls if the worker has room for them."""
        calls = self.take(self._room()) if self.ready else []
        if not calls:
            return
        if not self.sent:
            self._heard = time.monotonic()
        for call in calls:
            self.sent[call.number] = call
            self._note_sent(call)
        self.process.send(call.frame for call in calls)
        self._look_after(self._seconds_left())

    def take(self, most: int) -> list[C]:
        """Remove up to `most` calls from the queue; one that must be alone waits until it is."""
        taken: list[C] = []
        if self.sent and next(iter(self.sent.values())).alone:
            return taken
        while self.queue and len(taken) < most:
            call = self.queue[0]
            if call.alone and (taken or self.sent) and not call.answer.done():
                break
            self.queue.popleft()
            if not call.answer.done():
                taken.append(call)
                if call.alone:
                    break
        return taken

    def _look_after(self, seconds: float) -> None:
        """Make `run` check its calls after this time at the latest."""
        patience = self._patience
        if patience is not None and not patience.expired():
            when = asyncio.get_running_loop().time() + seconds
            if when < (patience.when() or math.inf):
                patience.reschedule(when)

    def forget(self, number: int) -> None:
        """Drop a call that the process no longer has."""
        self.sent.pop(number, None)
        self.due.pop(number, None)

    async def run(self) -> None:
        """Serve until cancelled. The worker has been started."""
        while True:
            try:
                await self._serve()
            except WorkerLost as lost:
                self._lose(lost)
            self.ready = False
            self.replaced += 1
            await self.process.kill()
            while not self.ready:
                try:
                    await self.start()
                except RewardError as error:
                    if str(error) != str(self.error):  # once: this is tried again and again
                        title = self.process.program.title
                        log.error("%s cannot be started again: %s", title, error)
                    self.error = error
                    await self._wait_to_start(error)

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Kill the worker, or let it end within `grace_seconds`; calls stay as they are."""
        if grace_seconds:
            await self.process.finish(grace_seconds)
        else:
            await self.process.kill()
        self.ready = False

    async def _serve(self) -> None:
        """Send calls and take answers until the worker must be replaced. Raises WorkerLost."""
        last_look = math.inf
        while not self._is_worn_out():
            self.feed()
            left = self._seconds_left()
            if left > 0:
                last_look = math.inf
            elif last_look == math.inf:
                last_look = time.monotonic() + _LATE_SECONDS
            messages = await self._messages(left if left > 0 else last_look - time.monotonic())
            for message in messages:
                self._take_in(message)
            # Also while others are answered: they would hide a call that never is.
            if time.monotonic() >= last_look and self._seconds_left() <= 0:
                self._give_up_overdue()
                return

    async def _messages(self, seconds: float) -> list[Any]:
        """Return the worker's next messages; empty if none comes in time. Raises WorkerLost."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        patience = self._patience = asyncio.timeout(None if seconds == math.inf else seconds)
        try:
            async with patience:
                messages = await self.process.receive()
        except TimeoutError:
            now = loop.time()
            late = now - (patience.when() or now)
            if late > _SUSPENDED_SECONDS and self._forgotten_waits < _MAX_FORGOTTEN_WAITS:
                # Every call gets the time of this wait again: the worker may not have run.
                self._forgotten_waits += 1
                self._heard += now - began
                self.due = {number: due + now - began for number, due in self.due.items()}
            return []
        finally:
            self._patience = None
        self._heard, self._forgotten_waits = time.monotonic(), 0
        return messages

    def _seconds_left(self) -> float:
        """Time until the first call is overdue, from the last message if none has begun yet."""
        if self.due:
            return min(self.due.values()) - time.monotonic()
        if not self.sent:
            return math.inf
        return self._heard + next(iter(self.sent.values())).seconds - time.monotonic()


L = TypeVar("L", bound=Lane[Any])


class Pool(Generic[L]):
    """Lanes that are started and closed together."""

    def __init__(self, lanes: Sequence[L]) -> None:
        self._lanes = lanes
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every worker. Raises RewardError if one cannot be started."""
        starts = (lane.start() for lane in self._lanes)
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                await self.close()
                raise result
        self._loops = [asyncio.create_task(lane.run()) for lane in self._lanes]

    async def close(self, grace_seconds: float = 0.0) -> None:
        """End the workers after `grace_seconds`; calls in progress fail. Idempotent."""
        loops, self._loops = self._loops, []
        for task in loops:
            task.cancel()
        if loops:
            await asyncio.wait(loops)
        await asyncio.gather(*(lane.close(grace_seconds) for lane in self._lanes))
