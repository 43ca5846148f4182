"""The calls of a pool: from the caller to a reward or a failure, in one or more attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.errors import RewardError, RewardFailed, RewardTimeout
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.protocol import UNSCORED, WHOLE_SUM, Failed, ServiceUse
from asyncrl.wire.records.evaluations import Verdict
from asyncrl.wire.records.reward_counts import ServiceCounts

_SHOWN_CHARACTERS = 80
"""Of a response that an error message quotes."""


class Reward(NamedTuple):
    """What a response is worth."""

    value: float
    """The weighted sum, finite in float32."""
    terms: tuple[float, ...] = ()
    """What each function returned, in the order of the configuration, without weights; empty for
    a failure that counts as 0."""
    verdict: Verdict = "scored"
    """Unless `scored`, it failed and counts as 0 in training."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call and the future that receives its reward."""

    number: int
    """Of the call, as its answers carry it."""
    frame: bytes
    """The call as it is sent."""
    description: str
    """The example and the response, for error messages."""
    reward: asyncio.Future[Reward]
    attempts: int = 0
    """Processes that died while they computed it."""
    lost_before_begin: int = 0
    """Processes that died with this call first in their input."""
    alone: bool = False
    """Its process died while it computed other calls too: repeat it alone, so that the call that
    is at fault does not use up the attempts of the others."""

    @property
    def is_settled(self) -> bool:
        """Whether it has a reward or failed, or its caller was cancelled."""
        return self.reward.done()

    def settle(self, result: Reward | RewardError) -> None:
        """Give the caller its result. A call that was cancelled has no caller any more."""
        with contextlib.suppress(asyncio.InvalidStateError):
            if isinstance(result, RewardError):
                self.reward.set_exception(result)
            else:
                self.reward.set_result(result)


def described(example_id: str, response: str) -> str:
    """Name an example and show the beginning of the response to it."""
    if len(response) > _SHOWN_CHARACTERS:
        response = response[:_SHOWN_CHARACTERS] + "..."
    shown = f"the response {response!r}"
    return f"{shown} to example {example_id!r}" if example_id else shown


@dataclass(slots=True)
class CallQueue:
    """The calls that no worker has, in order of arrival, and the errors that they may end with."""

    config: RewardConfig
    waiting: deque[PendingCall] = field(default_factory=deque)
    retried: int = 0
    """Calls that were made again because their process had died."""
    lanes_ready: int = 0
    """Lanes whose worker runs."""
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call arrives."""

    services: dict[str, ServiceCounts] = field(default_factory=dict)
    """By function, what was used of servers."""

    def note_uses(self, uses: Iterable[ServiceUse]) -> None:
        """Add what a call used of servers."""
        for use in uses:
            label = self.label(use.term)
            used = ServiceCounts(
                requests=use.requests,
                retries=use.retries,
                seconds=use.seconds,
                opened=int(use.opened),
            )
            self.services[label] = self.services.get(label, ServiceCounts()) + used

    def add(self, pending: PendingCall) -> None:
        """Queue a new call."""
        self.waiting.append(pending)
        self.filled.set()

    def take(self, most: int) -> list[PendingCall]:
        """Take calls from the front; one that must be alone comes alone."""
        taken: list[PendingCall] = []
        while self.waiting and len(taken) < most:
            if self.waiting[0].alone and taken:
                break
            pending = self.waiting.popleft()
            if not pending.is_settled:
                taken.append(pending)
                if pending.alone:
                    break
        return taken

    def put_back(self, calls: Iterable[PendingCall]) -> None:
        """Return calls to the front, in their order."""
        self.waiting.extendleft(reversed([one for one in calls if not one.is_settled]))

    def process_died(self, victims: list[PendingCall], terms: dict[int, int], how: str) -> None:
        """Repeat the calls whose process has died, or fail those that have had all attempts.

        Args:
            victims: the calls that the process was computing.
            terms: by call, the index of the term that was being computed.
            how: how the process ended.
        """
        if len(victims) > 1:
            self.repeat_alone(victims)
            return
        again = []
        for pending in victims:
            pending.attempts += 1
            if pending.attempts < self.config.max_attempts:
                again.append(pending)
                self.retried += 1
            else:
                pending.settle(self.died(pending, terms.get(pending.number, 0), how))
        self.put_back(again)

    async def fail_next(self, error: RewardError) -> None:
        """Wait for a call and fail it: no process can compute it."""
        while not (calls := self.take(1)):
            self.filled.clear()
            await self.filled.wait()
        function = self.label(0)
        calls[0].settle(
            RewardFailed(str(error), function=function, reason="not_loaded", unscored=True)
        )

    def repeat_alone(self, calls: list[PendingCall]) -> None:
        """Repeat calls of which one, nobody knows which, has ended or blocked their process."""
        for pending in calls:
            pending.alone = True
        self.retried += len(calls)
        self.put_back(calls)

    def died(self, pending: PendingCall, term: int, how: str) -> RewardFailed:
        """The error of a call whose processes all died, the last one as `how` says."""
        tried = f" (attempt {pending.attempts} of {self.config.max_attempts})"
        return RewardFailed(
            f"reward {self.name(term)!r}: its process {how}\nIt was scoring {pending.description}"
            f"{tried if self.config.max_attempts > 1 else ''}",
            function=self.label(term),
            reason="died",
        )

    def too_many_processes(self, pending: PendingCall, terms: dict[int, int], how: str) -> None:
        """Fail a call that started too many processes: repeating it would do so again."""
        term = terms.get(pending.number, 0)
        pending.settle(
            RewardFailed(
                f"reward {self.name(term)!r}: its process {how}. It was scoring "
                f"{pending.description}",
                function=self.label(term),
                reason="too_many_processes",
            )
        )

    def overdue(
        self, pending: PendingCall, term: int, why: str = "", *, waited: bool = False
    ) -> RewardTimeout:
        """The error of a call that took too long.

        Args:
            pending: the call.
            term: its function.
            why: what it waited for.
            waited: it waited for something else, and did not compute.
        """
        return RewardTimeout(
            f"reward {self.name(term)!r} did not return within {self.config.timeout_seconds:g} s "
            f"(rewards.timeout_seconds) for {pending.description}{': ' + why if why else ''}",
            function=self.label(term),
            unscored=waited,
        )

    def failed(self, pending: PendingCall, answer: Failed) -> RewardFailed:
        """The error of a call that the worker could not score."""
        self.note_uses(answer.uses)
        if answer.reason == "timeout":
            return self.overdue(pending, answer.term, answer.message, waited=True)
        what = "the rewards" if answer.term == WHOLE_SUM else f"reward {self.name(answer.term)!r}"
        return RewardFailed(
            f"{what} failed for {pending.description}:\n{answer.message}",
            function=self.label(answer.term),
            reason=answer.reason,
            unscored=answer.reason in UNSCORED,
        )

    def name(self, term: int) -> str:
        """The function as the configuration names it."""
        functions = self.config.functions
        return functions[term].name if 0 <= term < len(functions) else "weighted sum"

    def label(self, term: int) -> str:
        """The function's name in metrics."""
        labels = self.config.labels
        return labels[term] if 0 <= term < len(labels) else "weighted sum"
