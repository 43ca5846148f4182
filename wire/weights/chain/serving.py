"""Chooses the child that gets the next chunk.

Pure: events in, decisions out, no clock, no I/O. Children take turns, chunk by chunk. A request for
a chunk that has not arrived is kept; the number of requests of a child is bounded.
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from asyncrl.wire.messages.chain import Ask

MAX_ASKS = 64
"""Chunks that a child may have outstanding: several times `Timing.window`."""
WAITING_SECONDS = 0.5
"""Longest silence towards a child that is owed something; below `Timing.silent_seconds` / 2."""


class State(Enum):
    """State of one chunk at this node."""

    HERE = "here"
    COMING = "coming"
    GONE = "gone"


class Turn(NamedTuple):
    """A chunk to send."""

    child: str
    ask: Ask
    more: bool
    """True if others that this child asked for are here too."""


class _Child:
    def __init__(self, now: float) -> None:
        self.asks: OrderedDict[tuple[str, int], Ask] = OrderedDict()
        self.told = now


class Serving:
    """The children of a node and the chunks that they are owed."""

    def __init__(self, state: Callable[[str, int], State]) -> None:
        self._state = state
        self._children: OrderedDict[str, _Child] = OrderedDict()
        """Children in order of their turns."""

    def ask(self, child: str, ask: Ask, now: float) -> bool:
        """Note a child's request, for one version at a time; False if it asks for too much."""
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
        """Return the next chunk to send and its child; None if no owed chunk is here."""
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
        """Remove and return children and requested versions that will never be complete here."""
        found = []
        for name, one in self._children.items():
            for version, index in list(one.asks):
                if self._state(version, index) is State.GONE:
                    del one.asks[version, index]
                    found.append((name, version))
        return list(dict.fromkeys(found))

    def kept_waiting(self, now: float) -> list[tuple[str, str]]:
        """Return children due for a sign of life, and the version that each waits for."""
        found = []
        for name, one in self._children.items():
            if one.asks and now - one.told >= WAITING_SECONDS:
                one.told = now
                found.append((name, next(iter(one.asks))[0]))
        return found

    def forget(self, child: str) -> None:
        """Forget a child that cannot be reached."""
        self._children.pop(child, None)
