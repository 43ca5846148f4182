"""The pool of environments: sessions in worker processes, all bounded.

    open ──► Session ──► step, restore ──► Lane ══► supervisor ──► worker: many environments

A session lives in one process. If that ends, the session is lost, and the caller opens another one
and replays it, if the environment can be replayed. At most `workers` times `sessions` are open;
other samples wait for a place, and those that are due come first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments import protocol
from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.protocol import Action, BadAnswerError, FailureReason, StepResult, Traits
from asyncrl.environments.registry import check_name
from asyncrl.environments.workers import messages
from asyncrl.environments.workers.interpreter import check_interpreter
from asyncrl.environments.workers.lane import EnvironmentLane, ProcessEnd
from asyncrl.environments.workers.messages import Answer, Call, Failed, Open, Opened, Stepped
from asyncrl.errors import RewardError, RewardFailed
from asyncrl.rewards.config import RewardConfig
from asyncrl.user_code.pool import Pool, is_logged
from asyncrl.wire.records.step import EnvironmentCounts

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
"""Time between two looks at the workers while none is ready."""


class EnvironmentFailed(RewardFailed):
    """An environment did not answer; `rewards.on_error` decides about its sample."""

    def __init__(self, message: str, reason: FailureReason, *, in_reset: bool = False) -> None:
        unscored = in_reset or reason in protocol.UNSCORED
        super().__init__(message, function=protocol.LABEL, reason=reason, unscored=unscored)


@dataclass(slots=True, eq=False)
class Session:
    """An open environment of one sample."""

    number: int
    name: str
    """Environment and example, for errors."""
    lane: EnvironmentLane
    pool: EnvironmentPool
    first: list[dict[str, Any]] | str | None = None
    """The result of `reset`."""
    traits: Traits = field(default_factory=Traits)
    max_turn_tokens: int | None = None
    parked: bool = False
    """The sample is finished, so the session does not take a place."""
    closed: bool = False

    @property
    def lost(self) -> bool:
        """True if its process has ended, or it has failed and cannot go back."""
        return self.number not in self.lane.sessions

    @property
    def process_end(self) -> ProcessEnd | None:
        """The end of its process; None if it runs, or only the session has failed."""
        return self.lane.end_of(self.number)

    async def step(self, action: Action, *, alone: bool = False) -> StepResult:
        """Send a turn and return the environment's answer.

        Raises EnvironmentFailed if that violates the protocol (the session is then `lost`, unless
        it can go back to before this turn), and SessionLost if the process has ended.
        """
        call = messages.Step(self.pool.number(), self.number, action)
        answer = await self.pool.call(self, call, "step", alone=alone)
        if not isinstance(answer, Stepped):
            raise TypeError(f"a step was answered with {type(answer).__name__}")
        self.max_turn_tokens = answer.max_turn_tokens
        try:  # the user's code can write to its process's files
            return protocol.checked_step(answer.result)
        except BadAnswerError as error:
            raise self.pool.failure(self, error.reason, "step", str(error)) from error

    async def restore(self, turn: int, *, alone: bool = False) -> None:
        """Go back to before this turn (from 0). Raises as `step`."""
        call = messages.Restore(self.pool.number(), self.number, turn)
        await self.pool.call(self, call, "restore", alone=alone)

    def park(self) -> None:
        """Give up the place of a finished sample; it stays open, since it may have to go back."""
        if not self.parked:
            self.parked = True
            self.pool.give_place()

    def close(self) -> None:
        """End it. Idempotent; does not wait."""
        if not self.closed:
            self.closed = True
            self.lane.close_session(self.number)
            if not self.parked:
                self.pool.give_place()


class EnvironmentPool(Pool[EnvironmentLane]):
    """Opens environments in `config.workers` processes. Used from one asyncio event loop.

    `on_error`, `max_attempts` and the process limits of `rewards` apply here too. `on_call` gets
    the method and the seconds of each call.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        rewards: RewardConfig,
        on_call: Callable[[str, float], None] = lambda _method, _seconds: None,
    ) -> None:
        super().__init__([EnvironmentLane(config, rewards) for _ in range(config.workers)])
        self.config = config
        self.rewards = rewards
        self._numbers = itertools.count()
        self._places = config.workers * config.sessions
        self._waiting: dict[asyncio.Future[None], Callable[[], int]] = {}
        """Waiting callers in order of arrival, and their priority."""
        self.failures: Counter[str] = Counter()
        """Failed samples by `FailureReason`."""
        self.steps = 0
        """Number of answered turns, including replayed ones."""
        self.step_seconds = 0.0
        """Total time of these turns."""
        self._on_call = on_call

    @property
    def counts(self) -> EnvironmentCounts:
        """Counts of its processes so far."""
        return EnvironmentCounts(
            turns=self.steps,
            seconds=self.step_seconds,
            hanging=sum(lane.left_behind for lane in self._lanes),
            replaced_workers=sum(lane.replaced for lane in self._lanes),
        )

    async def start(self) -> None:
        """Check the name and start every worker.

        Raises RewardError if the environment does not exist, cannot be imported, does not take the
        given arguments, or its interpreter cannot run it.
        """
        check_name(self.config.name or "")
        if self.config.python is not None:
            await asyncio.to_thread(check_interpreter, self.config.python)
        await super().start()
        notes = (note for lane in self._lanes for note in lane.process.loaded.notes)
        for note in dict.fromkeys(notes):
            log.warning("%s", note)

    def number(self) -> int:
        """Return a number that no other session or call of the pool has."""
        return next(self._numbers)

    async def open(
        self,
        row: dict[str, Any],
        seed: int,
        *,
        example_id: str = "",
        priority: Callable[[], int] = lambda: 0,
        alone: bool = False,
    ) -> Session:
        """Make an environment and reset it with the example's row and the sample's seed.

        Among waiting callers, lower values of `priority` come first. With `alone`, no other call
        runs in the process at the same time. Raises EnvironmentFailed and SessionLost as
        `Session.step`.
        """
        await self._take_place(priority)
        name = f"environment {self.config.name!r}"
        if example_id:
            name += f" of example {example_id!r}"
        session = None
        try:
            lane = await self._lane()
            session = Session(self.number(), name, lane, self)
            call = Open(self.number(), session.number, row, seed)
            answer = await self.call(session, call, "reset", alone=alone)
            if not isinstance(answer, Opened):
                raise TypeError(f"a reset was answered with {type(answer).__name__}")
            session.first = protocol.checked_reset(answer.first)
            protocol.checked_tools(answer.traits.tools)
            session.traits = answer.traits
            session.max_turn_tokens = answer.max_turn_tokens
        except BaseException as error:
            if session is None:
                self.give_place()
            else:
                session.close()
            if isinstance(error, BadAnswerError) and session is not None:
                raise self.failure(session, error.reason, "reset", str(error)) from error
            raise
        return session

    async def call(self, session: Session, call: Call, method: str, *, alone: bool) -> Answer:
        """Make a call of a session. Raises EnvironmentFailed, SessionLost."""
        seconds = self.config.step_timeout_seconds
        if isinstance(call, Open):
            seconds = self.config.reset_timeout_seconds
        began = time.monotonic()
        answer = await session.lane.call(call, seconds, alone=alone)
        took = time.monotonic() - began
        self._on_call(method, took)
        if isinstance(answer, Failed):
            raise self.failure(session, answer.reason, method, answer.message, seconds)
        if isinstance(answer, Stepped):
            self.steps += 1
            self.step_seconds += took
        return answer

    def failure(
        self, session: Session, reason: FailureReason, method: str, text: str, seconds: float = 0.0
    ) -> EnvironmentFailed:
        """Return the error of a session that did not answer."""
        if reason == "timeout":
            kind = "reset" if method == "reset" else "step"
            text = f"did not return within {seconds:g} s (environment.{kind}_timeout_seconds)"
        text = f"{session.name}: {method}: {text}"
        return EnvironmentFailed(text, reason, in_reset=method == "reset")

    def count(self, error: EnvironmentFailed) -> None:
        """Count a failed sample, and log the first ones."""
        self.failures[error.reason] += 1
        count = self.failures[error.reason]
        if self.rewards.on_error == "zero" and is_logged(count):
            log.warning("counted as 0 (rewards.on_error: zero), number %d: %s", count, error)

    def give_place(self) -> None:
        """Free a session's place for the next caller."""
        self._places += 1
        waiting = [place for place in self._waiting if not place.done()]
        if waiting and self._places > 0:
            self._places -= 1
            min(waiting, key=lambda place: self._waiting[place]()).set_result(None)

    @property
    def queued(self) -> int:
        """Number of callers that wait for a place."""
        return sum(not place.done() for place in self._waiting)

    async def _take_place(self, priority: Callable[[], int]) -> None:
        if not self._loops:
            raise RewardError("the environments are not running: not started yet, or closed")
        if self._places > 0:
            self._places -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = priority
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_place()
            raise
        finally:
            del self._waiting[place]

    async def _lane(self) -> EnvironmentLane:
        """Return the running lane with the fewest sessions. Raises EnvironmentFailed."""
        while not (ready := [lane for lane in self._lanes if lane.ready]):
            if all(lane.error is not None for lane in self._lanes):
                raise EnvironmentFailed(str(self._lanes[0].error), "not_loaded")
            await asyncio.sleep(_LOOK_SECONDS)
        return min(ready, key=lambda lane: len(lane.sessions))
