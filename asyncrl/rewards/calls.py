"""Calls of a pool: from the caller to a reward or a failure, in one or more attempts."""

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
"""Longest quotation of a response in an error message."""


class Reward(NamedTuple):
    """The reward of a response."""

    value: float
    """The weighted sum, finite in float32."""
    terms: tuple[float | None, ...] = ()
    """The functions' values in the order of the configuration, without weights; None where one
    does not apply; empty after a failure that counts as 0."""
    verdict: Verdict = "scored"
    """Any other verdict is a failure, which counts as 0 in training."""


@dataclass(slots=True, eq=False, kw_only=True)
class RewardCall(PendingCall):
    """A call that is repeated in another process if its own dies."""

    description: str
    """The example and the response, for error messages."""
    term: int = 0
    """Index of the function that runs now."""
    attempts: int = 0
    """Number of processes that died while they computed this call."""
    lost_before_begin: int = 0
    """Number of processes that died with this call first in their input."""


def described(example_id: str, response: str) -> str:
    """Name an example and show the beginning of the response to it."""
    if len(response) > _SHOWN_CHARACTERS:
        response = response[:_SHOWN_CHARACTERS] + "..."
    shown = f"the response {response!r}"
    return f"{shown} to example {example_id!r}" if example_id else shown


@dataclass(slots=True)
class CallQueue:
    """Calls that were not sent to a worker, in order of arrival, and the errors of failed calls."""

    config: RewardConfig
    waiting: deque[RewardCall] = field(default_factory=deque)
    retried: int = 0
    """Number of calls that were repeated because their process had died."""
    services: dict[str, ServiceCounts] = field(default_factory=dict)
    """Requests to servers, by function."""

    def note_uses(self, uses: Iterable[ServiceUse]) -> None:
        """Add the requests that one call made to servers."""
        for use in uses:
            label = self.label(use.term)
            self.services[label] = self.services.get(label, ServiceCounts()) + ServiceCounts(
                requests=use.requests, retries=use.retries, seconds=use.seconds, opened=use.opened
            )

    def put_back(self, calls: Iterable[RewardCall]) -> None:
        """Return calls to the front, in their order."""
        self.waiting.extendleft(reversed([one for one in calls if not one.answer.done()]))

    def process_died(self, victims: list[RewardCall], lost: WorkerLost) -> None:
        """Repeat the calls of a dead process, or fail the only one after its last attempt.

        A call that starts too many processes is not repeated.
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
        """Repeat each call alone, because one of them, unknown which, ended or blocked a process.

        Then the call at fault does not use up the attempts of the others.
        """
        for call in calls:
            call.alone = True
        self.retried += len(calls)
        self.put_back(calls)

    def died(self, call: RewardCall, lost: WorkerLost) -> RewardFailed:
        """Return the error of a call that killed its processes or started too many."""
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
        """Return the error of a call that took too long; `waited`: for a service named in `why`."""
        return RewardTimeout(
            f"reward {self.name(call.term)!r} did not return within "
            f"{self.config.timeout_seconds:g} s (rewards.timeout_seconds) for {call.description}"
            f"{': ' + why if why else ''}",
            function=self.label(call.term),
            unscored=waited,
        )

    def failed(self, call: RewardCall, answer: Failed) -> RewardFailed:
        """Return the error of a call that the worker could not score."""
        call.term = answer.term
        if answer.reason == "timeout":
            return self.overdue(call, answer.message, waited=True)
        what = "the rewards" if answer.term == WHOLE_SUM else f"reward {self.name(answer.term)!r}"
        text = f"{what} failed for {call.description}:\n{answer.message}"
        label, reason = self.label(answer.term), answer.reason
        return RewardFailed(text, function=label, reason=reason, unscored=reason in UNSCORED)

    def none_applies(self, description: str) -> RewardFailed:
        """Return the error of a sample for which every function returned None."""
        names = ", ".join(repr(one.name) for one in self.config.functions)
        each = "" if len(self.config.functions) == 1 else "each of "
        return RewardFailed(
            f"no reward for {description}: {each}{names} returned None, which means that the "
            "function does not apply to the sample. Return a number, add a function that applies, "
            "or leave the row out with task.map",
            function=self.label(WHOLE_SUM),
            reason="not_a_number",
        )

    def name(self, term: int) -> str:
        """Return the function's name in the configuration."""
        return "weighted sum" if term == WHOLE_SUM else self.config.functions[term].name

    def label(self, term: int) -> str:
        """Return the function's name in metrics."""
        return "weighted sum" if term == WHOLE_SUM else self.config.labels[term]
