"""One worker of the pool: sends the calls of its sessions and replaces its process if that dies.

Calls run concurrently, so when a process dies or its event loop is blocked, the call at fault is
unknown unless it was the only one. All sessions of the process are lost. Those with a call in
progress are suspects: they are made again, and run alone until that call is answered.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.workers import interpreter, messages
from asyncrl.environments.workers.messages import Answer, Failed, Hanging, Open
from asyncrl.rewards.config import RewardConfig
from asyncrl.user_code.pool import Lane, PendingCall
from asyncrl.user_code.process import Program, WorkerLost, refusal
from asyncrl.user_code.streams import pack

log = logging.getLogger(__name__)

_LATE_SECONDS = 2.0
"""An event loop is blocked if an answer is this late, since the worker enforces time limits."""
_MAX_HANGING = 4
"""Most hanging threads of a worker; with more it is replaced."""
_ANSWERS: dict[type[Any], type[Any]] = {
    messages.Open: messages.Opened,
    messages.Step: messages.Stepped,
    messages.Restore: messages.Restored,
}


@dataclass(slots=True, eq=False)
class ProcessEnd:
    """The end of a process, shared by all samples whose sessions it had."""

    how: str
    explained: bool = False
    """The sample at fault is known, so the others are not suspects."""


class SessionLost(Exception):  # noqa: N818 - says what happened
    """The process of a session has ended; the session can be replayed if its environment allows."""

    def __init__(
        self, how: str, end: ProcessEnd, *, suspects: int = 0, too_many: bool = False
    ) -> None:
        super().__init__(how)
        self.end = end
        self.suspects = suspects
        """Number of the process's calls if this session had one of them, else 0."""
        self.too_many = too_many
        """The process was killed because it had started too many processes."""


@dataclass(slots=True, eq=False, kw_only=True)
class SessionCall(PendingCall):
    """A call of a session."""

    message: messages.Call


class EnvironmentLane(Lane[SessionCall]):
    """Serves one worker process, with the limits of `rewards`. Used from one event loop."""

    def __init__(self, config: EnvironmentConfig, rewards: RewardConfig) -> None:
        seconds = config.reset_timeout_seconds, config.step_timeout_seconds
        setup = pack(messages.Setup(config.name or "", config.args, str(Path.cwd()), *seconds))
        command = interpreter.command("asyncrl.environments.workers.worker", config.python)
        contents = f"the environment ({config.name}) was"
        limits = rewards.startup_seconds, rewards.max_processes, rewards.max_attempts
        program = Program(command, "an environment worker", contents, setup, *limits)
        super().__init__(program, Answer | Hanging, deque())
        self._hanging = 0
        self.left_behind = 0
        """Number of threads left behind because they hang, in all processes so far."""
        self.sessions: set[int] = set()
        """The sessions of the current process."""
        self._last_end = ProcessEnd("has not been started")
        self._ends: dict[int, ProcessEnd] = {}

    def end_of(self, session: int) -> ProcessEnd | None:
        """Return the end of the process of this session, until the session is closed."""
        return self._ends.get(session)

    async def call(self, message: messages.Call, seconds: float, *, alone: bool) -> Answer:
        """Make a call and wait for its answer.

        The worker enforces its time limit in `seconds`. With `alone`, no other call runs at the
        same time. Raises SessionLost if the process has ended.
        """
        if not (self.ready if isinstance(message, Open) else message.session in self.sessions):
            raise self._lost(message)
        try:
            frame = pack(message)
        except Exception as error:  # noqa: BLE001 - from the policy's values
            return Failed(message.call, "wrong_type", f"the turn cannot be sent to it: {error}")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        late = seconds + _LATE_SECONDS
        call = SessionCall(message.call, frame, late, answer, alone, message=message)
        self.queue.append(call)
        self.feed()
        try:
            return await answer
        except asyncio.CancelledError:
            self.feed()  # others may have waited for its turn
            raise

    def take(self, most: int) -> list[SessionCall]:
        """Take calls from the queue, except for those of ended sessions, which fail."""
        for call in self.queue:
            message = call.message
            if not isinstance(message, Open) and message.session not in self.sessions:
                call.settle(self._lost(message))
        return super().take(most)

    def _lost(self, message: messages.Call) -> SessionLost:
        end = self._last_end
        if not isinstance(message, Open):
            failed = ProcessEnd("no longer has its session, which has failed")
            end = self._ends.get(message.session, failed)
        return SessionLost(end.how, end)

    def close_session(self, session: int) -> None:
        """End a session, after the call that it is serving."""
        self._ends.pop(session, None)
        if session in self.sessions:
            self.sessions.discard(session)
            self.process.send([pack(messages.Close(session))])
            if self._hanging:
                self._look_after(0.0)

    async def close(self, grace_seconds: float = 0.0) -> None:
        """End the worker; its sessions are lost."""
        await super().close(grace_seconds)
        self._lose_sessions(ProcessEnd("was closed"))

    def _room(self) -> int:
        return len(self.queue)

    def _note_sent(self, call: SessionCall) -> None:
        self.due[call.number] = time.monotonic() + call.seconds
        if isinstance(call.message, Open):
            self.sessions.add(call.message.session)

    def _take_in(self, message: Any) -> None:
        if isinstance(message, Hanging):
            self._note_hanging(message.threads)
            return
        if not isinstance(message, Answer):
            raise refusal(f"{type(message).__name__} in answer to no call")
        call = self.sent.get(message.call)
        if call is None or not isinstance(message, (_ANSWERS[type(call.message)], Failed)):
            raise refusal(f"{type(message).__name__} for a call that it does not have")
        self.forget(call.number)
        if isinstance(message, Failed):
            if not message.continues:
                self.sessions.discard(call.message.session)
            self._note_hanging(message.hanging)
        call.settle(message)

    def _give_up_overdue(self) -> None:
        """Replace a process whose event loop is blocked."""
        now = time.monotonic()
        late = [number for number, due in self.due.items() if due <= now]
        end = ProcessEnd("is replaced, because a call blocks its event loop", len(late) == 1)
        if len(late) == 1:
            self._take_in(Failed(late[0], "timeout", ""))
        for call in list(self.sent.values()):
            if call.number not in late:  # it only waited for the one that blocks
                self.forget(call.number)
                call.settle(SessionLost("was replaced while another call blocked it", end))
        self._lose_sessions(end)

    def _is_worn_out(self) -> bool:
        if not self._hanging or (self._hanging <= _MAX_HANGING and self.sessions):
            return False
        end = ProcessEnd(f"is replaced; threads in it that hang: {self._hanging}")
        self._lose_sessions(end, suspects=0)  # their calls are over
        return True

    def _lose(self, lost: WorkerLost) -> None:
        self._lose_sessions(ProcessEnd(str(lost)), too_many=lost.too_many)

    def _note_hanging(self, threads: int) -> None:
        self.left_behind += max(0, threads - self._hanging)
        self._hanging = threads

    def _lose_sessions(
        self, end: ProcessEnd, *, suspects: int | None = None, too_many: bool = False
    ) -> None:
        """End all sessions with their process; by default the calls in progress are suspects."""
        if self.ready:
            log.warning("the process of an environment worker %s", end.how.partition("\n")[0])
        self.ready = False
        self._last_end = end
        calls, waiting = list(self.sent.values()), list(self.queue)
        for of_calls in (self.sent, self.due, self.queue):
            of_calls.clear()
        self._ends |= dict.fromkeys(self.sessions, end)
        self.sessions.clear()
        self._hanging = 0
        count = len(calls) if suspects is None else suspects
        end.explained = end.explained or count == 1
        for call in calls:
            call.settle(SessionLost(end.how, end, suspects=count, too_many=too_many))
        for call in waiting:
            call.settle(SessionLost(end.how, end))
