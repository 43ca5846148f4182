"""One worker of the pool: calls of its sessions go in, answers come out; it is replaced if it dies.

run         consumes: the worker's answers. produces: results, failures, lost sessions.
            waits for: the worker. bounded by: the time limit of each call, `startup_seconds`.

Calls run at once, so when a process dies or its loop is blocked nobody knows which of them is at
fault unless it was the only one. All sessions of the process are lost. Those with a call in
progress are suspects: they are made again, and run alone until that call is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.workers import interpreter
from asyncrl.environments.workers.messages import (
    Answer,
    Call,
    Close,
    Failed,
    FromWorker,
    Hanging,
    Open,
    Opened,
    Ready,
    Restore,
    Restored,
    Setup,
    Step,
    Stepped,
)
from asyncrl.errors import RewardError
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.process import Program, UserProcess, WorkerLost, refused
from asyncrl.rewards.protocol import Refused
from asyncrl.user_code.streams import MAX_FRAME, pack
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason

_DECODER: FrameDecoder[FromWorker] = FrameDecoder(FromWorker, max_bytes=MAX_FRAME)


class EnvironmentProcess(UserProcess[FromWorker]):
    """A worker of environments.

    Args:
        config: of the environment, with a name.
        rewards: `startup_seconds` and `max_processes` hold here too.
    """

    def __init__(self, config: EnvironmentConfig, rewards: RewardConfig) -> None:
        setup = Setup(
            config.name or "",
            config.args,
            str(Path.cwd()),
            config.reset_timeout_seconds,
            config.step_timeout_seconds,
        )
        super().__init__(
            Program(
                interpreter.command("asyncrl.environments.workers.worker", config.python),
                "environment",
                f"the environment ({config.name})",
                "was",
                pack(setup),
                rewards.startup_seconds,
                rewards.max_processes,
            ),
            _DECODER,
        )
        self.notes: list[str] = []
        """What a user should know of the environment, a sentence each."""

    def check_answer(self, answer: FromWorker) -> None:
        """See the base class."""
        if isinstance(answer, Refused):
            raise RewardError(answer.message)
        if not isinstance(answer, Ready):
            raise WorkerLost(f"sent {type(answer).__name__} before it was ready")
        self.notes = answer.notes


class Turnstile:
    """Many may be inside at once; one that must be alone waits until all have left.

    While one waits to be alone nobody else enters, so it gets its turn. Leaving waits for nothing:
    whoever is cancelled inside has told those that wait.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._inside = 0
        self._alone = 0
        """Callers that are or want to be inside alone."""
        self._occupied = False

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait to be let through, and leave at the end."""
        if not alone:
            await self._until(lambda: not self._alone)
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1
                self._changed.set()
            return
        self._alone += 1
        try:
            await self._until(lambda: not self._inside and not self._occupied)
            self._occupied = True
            try:
                yield
            finally:
                self._occupied = False
        finally:
            self._alone -= 1
            self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


log = logging.getLogger(__name__)

_LATE_SECONDS = 2.0
"""Beyond a call's time limit, which the worker itself keeps: then its event loop is blocked."""
_MAX_HANGING = 4
"""Most threads of a worker that hang; with more it is replaced."""
_RETRY_SECONDS = 1.0
_CALL_NUMBERS = itertools.count()


@dataclass(slots=True, eq=False)
class ProcessEnd:
    """The end of a process. All samples whose sessions it had share this object."""

    how: str
    explained: bool = False
    """One sample is known to be at fault, so it says nothing about the others."""


class SessionLost(Exception):  # noqa: N818 - says what happened
    """The process of a session has ended; it can be made again if it can be replayed."""

    def __init__(
        self, how: str, end: ProcessEnd, *, suspects: int = 0, too_many: bool = False
    ) -> None:
        super().__init__(how)
        self.end = end
        self.suspects = suspects
        """Calls that the process was serving, this session's among them; 0: it had none."""
        self.too_many = too_many
        """The process was killed because it had started too many processes."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that the worker has not answered."""

    call: Call
    answer: asyncio.Future[Answer]
    timer: asyncio.TimerHandle | None = None
    """Until it is overdue."""
    is_overdue: bool = False


class Lane:
    """Serves one worker process. Used from one event loop.

    Args:
        config: of the environment.
        rewards: the process is started and bounded as reward workers are.
    """

    def __init__(self, config: EnvironmentConfig, rewards: RewardConfig) -> None:
        self._config = config
        self._attempts = rewards.max_attempts
        self._process = EnvironmentProcess(config, rewards)
        self._pending: dict[int, _Pending] = {}
        self._turnstile = Turnstile()
        self._hanging = 0
        self.left_behind = 0
        """Threads that were left behind because they hang, in all processes so far."""
        self.replaced = 0
        """Processes that have ended, or were ended, and were replaced."""
        self._wake = asyncio.Event()
        """A call is overdue, or a process with threads that hang has lost its last session."""
        self.sessions: set[int] = set()
        """That the present process has."""
        self.ready = False
        """Whether the process runs."""
        self.became_ready = asyncio.Event()
        """Set while the process runs."""
        self.error: RewardError | None = None
        """Why no process can be started."""
        self._last_end = ProcessEnd("has not been started")
        self._ends: dict[int, ProcessEnd] = {}

    def end_of(self, session: int) -> ProcessEnd | None:
        """How the process ended that had this session, which has not been closed since."""
        return self._ends.get(session)

    @property
    def notes(self) -> list[str]:
        """What a user should know of the environment, a sentence each."""
        return self._process.notes

    async def start(self) -> None:
        """Start the worker; again if its process dies meanwhile.

        Raises:
            RewardError: the environment cannot be loaded, or the process died at every attempt.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                await self._process.start()
            except WorkerLost as error:
                if attempt == self._attempts:
                    raise
                log.warning("an environment worker is started again: %s", error)
            else:
                self.ready, self.error, self._hanging = True, None, 0
                self.became_ready.set()
                return

    async def call(self, call: Call, seconds: float, *, alone: bool) -> Answer:
        """Make a call and wait for its answer.

        Args:
            call: its session is one of this process, or a new one.
            seconds: its time limit, which the worker keeps.
            alone: no other call may run meanwhile.

        Raises:
            SessionLost: the process has ended, or had ended before.
        """
        async with self._turnstile.enter(alone=alone):
            if isinstance(call, Open):
                if not self.ready:
                    raise SessionLost(self._last_end.how, self._last_end)
                self.sessions.add(call.session)
            elif call.session not in self.sessions:
                end = self._ends.get(call.session, self._last_end)
                raise SessionLost(end.how, end)
            try:
                frame = pack(call)
            except Exception as error:  # noqa: BLE001 - of what the policy has written
                return Failed(call.call, "wrong_type", f"it cannot be given the turn: {error}")
            pending = _Pending(call, asyncio.get_running_loop().create_future())
            self._pending[call.call] = pending
            self._expect(pending, seconds + _LATE_SECONDS)
            self._process.send([frame])
            return await pending.answer

    def _expect(self, pending: _Pending, seconds: float) -> None:
        """A call is overdue after so many seconds in which this process was not held up itself."""
        loop = asyncio.get_running_loop()

        def ring() -> None:
            if loop.time() - due > _LATE_SECONDS:  # the answer may be there and has not been read
                self._expect(pending, _LATE_SECONDS)
            else:
                pending.is_overdue = True
                self._wake.set()

        due = loop.time() + seconds
        pending.timer = loop.call_at(due, ring)

    def close_session(self, session: int) -> None:
        """End a session; the worker does so after the call that it is serving."""
        self._ends.pop(session, None)
        if session in self.sessions:
            self.sessions.discard(session)
            self._process.send([pack(Close(session))])
            if self._hanging and not self.sessions:
                self._wake.set()

    async def run(self) -> None:
        """Serve until cancelled. The worker has been started."""
        while True:
            try:
                await self._serve()
            except WorkerLost as lost:
                text = str(lost).partition("\n")[0]
                log.warning("the process of an environment worker %s", text)
                self._lose(ProcessEnd(str(lost)), too_many=lost.too_many)
            self.replaced += 1
            await self._process.kill()
            await self._restart()

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Kill the worker; its sessions are lost. `run` has been cancelled.

        Args:
            grace_seconds: for the `close` of its environments.
        """
        if grace_seconds:
            await self._process.finish(grace_seconds)
        else:
            await self._process.kill()
        self._lose(ProcessEnd("was closed"))

    async def _serve(self) -> None:
        """Settle what the worker answers. Raises WorkerLost."""
        tasks: list[asyncio.Task[Any]] = []
        receiving = woken = None
        try:
            while True:
                receiving = receiving or asyncio.create_task(self._process.receive())
                woken = woken or asyncio.create_task(self._wake.wait())
                tasks = [receiving, woken]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():  # first: it may have what is overdue
                    messages, receiving = receiving.result(), None
                    for message in messages:
                        self._handle(message)
                elif woken.done():
                    woken = None
                    self._wake.clear()
                    self._give_up_overdue()
                if self._hanging and (self._hanging > _MAX_HANGING or not self.sessions):
                    how = f"is replaced; threads in it that hang: {self._hanging}"
                    raise self._given_up(ProcessEnd(how), suspects=0)  # their calls are over
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait(tasks)

    def _handle(self, message: FromWorker) -> None:
        """Take in an answer. Raises WorkerLost if it answers nothing that was sent."""
        if isinstance(message, Hanging):
            self._note_hanging(message.threads)
            return
        if not isinstance(message, Answer):
            raise _refusal(f"{type(message).__name__} in answer to no call")
        pending = self._pending.pop(message.call, None)
        if pending is None or not _fits(pending.call, message):
            raise _refusal(f"{type(message).__name__} for a call that it does not have")
        _stop_waiting(pending)
        if isinstance(message, Failed):
            if not message.continues:
                self.sessions.discard(pending.call.session)
            self._note_hanging(message.hanging)
        if not pending.answer.done():
            pending.answer.set_result(message)

    def _note_hanging(self, threads: int) -> None:
        self.left_behind += max(0, threads - self._hanging)
        self._hanging = threads

    def _give_up_overdue(self) -> None:
        """Raises WorkerLost if a call is overdue: the worker's event loop is blocked."""
        late = [one for one in self._pending.values() if one.is_overdue]
        if not late:
            return
        end = ProcessEnd("is replaced, because a call blocks its event loop", len(late) == 1)
        if len(late) == 1:
            self._handle(Failed(late[0].call.call, "timeout", ""))
        for number, one in list(self._pending.items()):
            if not one.is_overdue:  # it only waited for the one that blocks
                del self._pending[number]
                _lost(one, SessionLost("was replaced while another call blocked it", end))
        raise self._given_up(end)

    def _given_up(self, end: ProcessEnd, *, suspects: int | None = None) -> WorkerLost:
        """The error of a process that is to be killed; its sessions are lost from now on."""
        self._lose(end, suspects=suspects)
        return WorkerLost(end.how)

    def _lose(
        self, end: ProcessEnd, *, suspects: int | None = None, too_many: bool = False
    ) -> None:
        """All sessions are lost with their process, by default by one of the calls in progress."""
        if self.ready:  # else they were lost when it was given up
            self._last_end = end
        self.ready = False
        self.became_ready.clear()
        pending, self._pending = list(self._pending.values()), {}
        self._ends |= dict.fromkeys(self.sessions, end)
        self.sessions.clear()
        count = len(pending) if suspects is None else suspects
        end.explained = end.explained or count == 1
        for one in pending:
            _lost(one, SessionLost(end.how, end, suspects=count, too_many=too_many))

    async def _restart(self) -> None:
        """Start a new process; `error` says why that fails meanwhile."""
        while not self.ready:
            try:
                await self.start()
            except RewardError as error:
                if str(error) != str(self.error):  # once: this is tried again every second
                    log.error("an environment worker cannot be started again: %s", error)
                self.error = error
                await asyncio.sleep(_RETRY_SECONDS)

    @staticmethod
    def next_call() -> int:
        """A number for a call."""
        return next(_CALL_NUMBERS)


def _stop_waiting(pending: _Pending) -> None:
    if pending.timer is not None:
        pending.timer.cancel()


def _lost(pending: _Pending, lost: SessionLost) -> None:
    _stop_waiting(pending)
    if not pending.answer.done():
        pending.answer.set_exception(lost)


def _fits(call: Call, answer: Answer) -> bool:
    expected = {Open: Opened, Step: Stepped, Restore: Restored}
    return isinstance(answer, (expected[type(call)], Failed))


def _refusal(text: str) -> WorkerLost:
    return refused(FrameRefused(Reason.UNEXPECTED, text))
