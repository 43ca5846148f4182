"""The results of one request, on their way from the engine's output task to the reader."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.extras import NO_TICKET
from asyncrl.rollout.trajectory import FloatArray, IntArray

T = TypeVar("T")


class AbortedError(EngineError):
    """The request was aborted from this side."""


class Inbox(Generic[T]):
    """Items for one reader, who is woken by each item, an end or an error."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._error: BaseException | None = None
        self._ready = asyncio.Event()
        self.started = False
        """True once an item or the end has arrived."""
        self.closed = False
        self.ticket = NO_TICKET

    def push(self, item: T, *, last: bool = False) -> None:
        """Add an item, and close the inbox after the last one; dropped if it is closed already."""
        if self.closed:
            return
        self._items.append(item)
        self.started = True
        self.closed |= last
        self._ready.set()

    def put(self, item: object) -> None:
        """Close it after an abort, or with an exception if the core died; items stay readable."""
        self.fail(item if isinstance(item, BaseException) else AbortedError("aborted"))

    def interrupt(self) -> None:
        """Interrupt the reader; scores are dropped."""
        self.put(None)

    def fail(self, error: BaseException) -> None:
        """Close it with an error, which every later `take` raises once nothing is left."""
        if self.closed:
            return
        self._error = error
        self.started = self.closed = True
        self._ready.set()

    @property
    def over(self) -> bool:
        """True once the last item was taken."""
        return self.closed and self._error is None and not self._items

    async def take(self) -> list[T]:
        """Wait for items, or `interrupt`, and take all of them.

        Raises AbortedError or EngineError once nothing is left of an aborted or failed request.
        """
        await self._ready.wait()
        if not self.closed:
            self._ready.clear()
        if not self._items and self._error is not None:
            raise self._error
        taken, self._items = self._items, []
        return taken


@dataclass(frozen=True, slots=True)
class Scored:
    """The table of a scoring request."""

    ids: IntArray
    """`[n, C]` for n scored tokens; columns as in `asyncrl.engine.remote.extras.ScoreColumns`."""
    logprobs: FloatArray
    """`[n, C]`"""
    policy_version: int


def not_finite(request_id: str) -> str:
    """Return the error message for a distribution that is NaN."""
    return (
        f"request {request_id!r}: the model's probabilities are not finite: its weights or "
        "activations overflowed"
    )
