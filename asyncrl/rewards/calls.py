"""The calls of a pool: from the caller to a reward or a failure, in one or more attempts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.errors import RewardFailed, RewardTimeout
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.protocol import UNSCORED, WHOLE_SUM, Failed, ServiceUse
from asyncrl.user_code.pool import PendingCall
from asyncrl.user_code.process import WorkerLost
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


@dataclass(slots=True, eq=False, kw_only=True)
class RewardCall(PendingCall):
    """A call that is repeated in another process if its own dies."""

    description: str
    """The example and the response, for error messages."""
    term: int = 0
    """Index of the function that is being computed."""
    attempts: int = 0
    """Processes that died while they computed it."""
    lost_before_begin: int = 0
    """Processes that died with this call first in their input."""


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
    waiting: deque[RewardCall] = field(default_factory=deque)
    retried: int = 0
    """Calls that were made again because their process had died."""
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

    def put_back(self, calls: Iterable[RewardCall]) -> None:
        """Return calls to the front, in their order."""
        self.waiting.extendleft(reversed([one for one in calls if not one.answer.done()]))

    def process_died(self, victims: list[RewardCall], lost: WorkerLost) -> None:
        """Repeat the calls that a process was computing, or fail one that has had all attempts.

        A call that starts too many processes would do so again.
        """
        if len(victims) > 1:
            self.repeat_alone(victims)
            return
        for call in victims:
            call.attempts += 1
            if lost.too_many or call.attempts >= self.config.max_attempts:
                call.settle(self.died(call, lost))
            else:
                self.retried += 1
                self.put_back([call])

    def repeat_alone(self, calls: list[RewardCall]) -> None:
        """Repeat calls of which one, nobody knows which, has ended or blocked their process.

        Alone, so that the call that is at fault does not use up the attempts of the others.
        """
        for call in calls:
            call.alone = True
        self.retried += len(calls)
        self.put_back(calls)

    def died(self, call: RewardCall, lost: WorkerLost) -> RewardFailed:
        """The error of a call whose processes all died, or that started too many processes."""
        rest, most = f"It was scoring {call.description}", self.config.max_attempts
        if not lost.too_many and most > 1:
            rest += f" (attempt {call.attempts} of {most})"
        return RewardFailed(
            f"reward {self.name(call.term)!r}: its process {lost}"
            f"{'. ' if lost.too_many else chr(10)}{rest}",
            function=self.label(call.term),
            reason="too_many_processes" if lost.too_many else "died",
        )

    def overdue(self, call: RewardCall, why: str = "", *, waited: bool = False) -> RewardTimeout:
        """The error of a call that took too long.

        With `waited` it did not compute, but waited for something else, which `why` names.
        """
        return RewardTimeout(
            f"reward {self.name(call.term)!r} did not return within "
            f"{self.config.timeout_seconds:g} s (rewards.timeout_seconds) for {call.description}"
            f"{': ' + why if why else ''}",
            function=self.label(call.term),
            unscored=waited,
        )

    def failed(self, call: RewardCall, answer: Failed) -> RewardFailed:
        """The error of a call that the worker could not score."""
        call.term = answer.term
        if answer.reason == "timeout":
            return self.overdue(call, answer.message, waited=True)
        what = "the rewards" if answer.term == WHOLE_SUM else f"reward {self.name(answer.term)!r}"
        return RewardFailed(
            f"{what} failed for {call.description}:\n{answer.message}",
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
