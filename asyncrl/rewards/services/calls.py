"""The context of a call for reward functions that ask a server: its deadline and its report.

The worker begins each call with its time limit, and adds the uses of servers to the answer.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from asyncrl.rewards.protocol import ServiceUse

ALONE_SECONDS = 60.0
"""Time limit of a call outside a worker (a function called by hand)."""
MARGIN_SECONDS = 0.2
"""A request is abandoned this long before the worker cancels it, to say what the server did."""


@dataclass(slots=True)
class CallState:
    """One call in a worker."""

    cancelled_at: float
    """Monotonic seconds."""
    term: int = 0
    uses: list[ServiceUse] = field(default_factory=list)


_current: ContextVar[CallState | None] = ContextVar("current", default=None)


def begin(seconds: float) -> CallState:
    """Begin a call with this time limit, in the task that computes it."""
    state = CallState(time.monotonic() + seconds)
    _current.set(state)
    return state


def begin_term(index: int) -> None:
    """Note that the call's function number `index` begins."""
    state = _current.get()
    if state is not None:
        state.term = index


def deadline() -> float:
    """Return when to abandon a request, in monotonic seconds."""
    state, now = _current.get(), time.monotonic()
    if state is None:
        return now + ALONE_SECONDS
    return state.cancelled_at - min(MARGIN_SECONDS, 0.1 * max(0.0, state.cancelled_at - now))


def report(requests: int, retries: dict[str, int], seconds: float, *, opened: bool) -> None:
    """Count a use of a server; see `ServiceUse`."""
    state = _current.get()
    if state is not None:
        state.uses.append(ServiceUse(state.term, requests, retries, seconds, opened))
