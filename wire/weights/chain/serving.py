"""Which child gets the next chunk. Pure: events in, decisions out, no clock, no I/O.

Children take turns, chunk by chunk, so one that asks for more is not served faster. An ask for a
chunk that is still to come is kept; the number of asks of a child is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from asyncrl.wire.messages.chain import Ask

MAX_ASKS = 64
"""Chunks that a child may have outstanding: several times `Timing.window`."""
WAITING_SECONDS = 0.5
"""A child that is owed something hears at least this often. Below half of any
`Timing.silent_seconds`."""


class State(Enum):
    """Of one chunk at this node."""

    HERE = "here"
    COMING = "coming"
    GONE = "gone"


class Turn(NamedTuple):
    """A chunk to send."""

    child: str
    ask: Ask
    more: bool
    """Others that this child asked for are here too."""


class _Child:
    def __init__(self, now: float) -> None:
        self.asks: OrderedDict[tuple[str, int], Ask] = OrderedDict()
        self.told = now
        """When it was last sent anything."""


class Serving:
    """The children of a node and what they are owed.

    Args:
        state: of a chunk (version, index) at this node, now.
    """

    def __init__(self, state: Callable[[str, int], State]) -> None:
        self._state = state
        self._children: OrderedDict[str, _Child] = OrderedDict()
        """The one whose turn it is first."""

    def ask(self, child: str, ask: Ask, now: float) -> bool:
        """Note what a child asks for; False if it asks for too much.

        Asks of other versions are forgotten: a child receives one at a time.
        """
        one = self._children.setdefault(child, _Child(now))
        if not one.asks:
            one.told = now
        if any(version != ask.version for version, _ in one.asks):
            one.asks.clear()
        if len(one.asks) >= MAX_ASKS and (ask.version, ask.index) not in one.asks:
            return False
        one.asks[ask.version, ask.index] = ask
        return True

    def next_chunk(self, now: float) -> Turn | None:
        """Whom to send which chunk now; None if no chunk that is owed is here."""
        for name, one in self._children.items():
            here = (ask for key, ask in one.asks.items() if self._state(*key) is State.HERE)
            if (ask := next(here, None)) is not None:
                more = next(here, None) is not None
                del one.asks[ask.version, ask.index]
                one.told = now
                self._children.move_to_end(name)
                return Turn(name, ask, more)
        return None

    def lost(self) -> list[tuple[str, str]]:
        """Children and versions that they ask for and that will never be whole here; forgotten."""
        found = []
        for name, one in self._children.items():
            for version, index in list(one.asks):
                if self._state(version, index) is State.GONE:
                    del one.asks[version, index]
                    found.append((name, version))
        return list(dict.fromkeys(found))

    def kept_waiting(self, now: float) -> list[tuple[str, str]]:
        """Children that have heard nothing for a while, and the version that they wait for."""
        found = []
        for name, one in self._children.items():
            if one.asks and now - one.told >= WAITING_SECONDS:
                one.told = now
                found.append((name, next(iter(one.asks))[0]))
        return found

    def forget(self, child: str) -> None:
        """A child cannot be reached."""
        self._children.pop(child, None)
