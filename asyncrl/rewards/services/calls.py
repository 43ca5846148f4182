"""What a reward function that asks a server knows of its call, and what it reports of it.

The worker begins each call with its time limit, and puts the uses of servers into the answer.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from asyncrl.rewards.protocol import ServiceUse

ALONE_SECONDS = 60.0
"""Time of a call that no worker limits (a function called by hand)."""
MARGIN_SECONDS = 0.2
"""A server is given up this long before the worker would cancel the call, so that the failure says
what the server did."""


@dataclass(slots=True)
class CallState:
    """One call in a worker."""

    cancelled_at: float
    """Monotonic seconds at which the worker cancels it."""
    term: int = 0
    """Index of the function that is being computed."""
    uses: list[ServiceUse] = field(default_factory=list)


_current: ContextVar[CallState | None] = ContextVar("current", default=None)


def begin(seconds: float) -> CallState:
    """Begin a call that may take so long, in the task that computes it."""
    state = CallState(time.monotonic() + seconds)
    _current.set(state)
    return state


def begin_term(index: int) -> None:
    """A function of the call begins."""
    state = _current.get()
    if state is not None:
        state.term = index


def deadline() -> float:
    """When a server is given up, in monotonic seconds."""
    state, now = _current.get(), time.monotonic()
    if state is None:
        return now + ALONE_SECONDS
    return state.cancelled_at - min(MARGIN_SECONDS, 0.1 * max(0.0, state.cancelled_at - now))


def report(requests: int, retries: dict[str, int], seconds: float, *, opened: bool) -> None:
    """Count a use of a server; see `ServiceUse`."""
    state = _current.get()
    if state is not None:
        state.uses.append(ServiceUse(state.term, requests, retries, seconds, opened))
