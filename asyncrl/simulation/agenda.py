"""What is due when, in a simulated run."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from asyncrl.scheduler import events
from asyncrl.simulation.sim_request import SimRequest


class FinishedReport(msgspec.Struct, frozen=True, gc=False):
    """The message that a sample is finished; outdated if the sample was resumed since."""

    generator: str
    request: SimRequest
    finishes: int
    """`request.finishes` when the message was sent."""


class FromTrainer(msgspec.Struct, frozen=True, gc=False):
    """Events that the trainer causes, at one time; outdated if that trainer is lost."""

    lineage: int
    events: tuple[events.Event, ...]


Due = events.Event | str | FinishedReport | FromTrainer | Callable[[], None]
"""What is due: an event for the scheduler, the name of a generator whose next request is done, a
report of a sample, events of the trainer, or something else that happens."""


class Agenda:
    """A heap of what is due; of things due at the same time, the first added comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Simulated time, in seconds."""
        self._due: list[tuple[float, int, Due]] = []
        self._count = 0

    def at(self, when: float, due: Due) -> None:
        """Add what is due at this time."""
        self._count += 1
        heapq.heappush(self._due, (when, self._count, due))

    def after(self, seconds: float, due: Due) -> None:
        """Add what is due in this many seconds."""
        self.at(self.now + seconds, due)

    def next(self) -> Due:
        """Move on to what is due next."""
        self.now, _, due = heapq.heappop(self._due)
        return due
