"""Decides which chunks of a version to ask of which parent.

Pure: events in, orders out, no clock, no I/O. A receiver asks its nearest parent for chunks in
ascending order, with at most `window` outstanding. It leaves a parent that

- has been silent for `silent_seconds` while it owes chunks (a waiting parent sends a sign of life),
- does not have the version and never will,
- sends damaged chunks, or
- is slower than the parent above it. That is measured: now and then the next `_BURST` chunks are
  asked of the parent above. If they come while the own parent sends at most one, `probes` times in
  a row, the own parent is left. A parent that is as fast as the one above sends as many in that
  time. A parent that has nothing more to send is given `_PATIENCE` times as long: the slow one may
  be above it, and it is about to leave that itself.

So a slow node keeps no children. A probe that finds nothing takes at most 1/32 of the time. A
receiver that has left all its parents begins again with the nearest one, until `limit_seconds` have
passed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from asyncrl.wire.weights.chain.serving import WAITING_SECONDS

_BURST = 4
_RARITY = 32
"""Time between two probes, in durations of a probe."""
_PATIENCE = 4
_DAMAGED = 3


class Timing(msgspec.Struct, frozen=True):
    """Limits of a receiver's patience."""

    window: int = 16
    """Chunks that may be outstanding."""
    silent_seconds: float = 3.0
    """Longest silence of a parent that owes chunks."""
    probe_seconds: float = 0.25
    """Shortest time between two probes of the parent above."""
    probes: int = 3
    """Probes in a row that a parent must lose to be left."""
    limit_seconds: float = 600.0
    stall_seconds: float = 30.0
    """Longest time in which no chunk comes from any parent."""


@dataclass(frozen=True, slots=True)
class Order:
    """Ask this parent for a chunk."""

    parent: str
    index: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Forget what this parent owes, and the connection to it."""

    parent: str


@dataclass(slots=True)
class _Parent:
    name: str
    owed: dict[int, float] = field(default_factory=dict)
    """Time of the request for each chunk, by index."""
    heard: float = 0.0
    """Time of its last message, or of the first request after it owed nothing."""
    behind: bool = False
    """It had more to send when it sent its last chunk."""
    damaged: int = 0
    left: str = ""
    """Reason why it is not asked; empty: it can be."""
    gone: bool = False
    """True if it will never have the version."""


@dataclass(slots=True)
class _Probe:
    parent: _Parent
    began: float
    chunks: set[int]
    sent: int = 0
    """Chunks that the own parent has sent during the probe."""


class Receiving:
    """One version on its way here, in `count` chunks from `parents`, the nearest first."""

    def __init__(self, count: int, parents: Sequence[str], timing: Timing, now: float) -> None:
        if not parents:
            raise ValueError("a receiver needs at least one parent")
        self._parents = [_Parent(name) for name in parents]
        self._by_name = {parent.name: parent for parent in self._parents}
        self._timing = timing
        self._own = self._parents[0]
        self._missing = dict.fromkeys(range(count))
        self._unasked = dict.fromkeys(range(count))
        """Missing chunks that no parent owes, ascending: children ask for them in this order."""
        self._began = self._got = now
        """Times of the request for the version, and of the last chunk."""
        self._probe: _Probe | None = None
        self._lost = 0
        self._next_probe = now + timing.probe_seconds
        self._probed = self._own_sent = now
        """Times of the end of the last probe, and of the own parent's last chunk."""
        self.failed = ""
        """Reason why the version will not arrive; empty: it can."""
        self.superseded = False
        """True if it failed because no parent has the version any longer."""

    @property
    def done(self) -> bool:
        """True if all chunks have arrived."""
        return not self._missing

    @property
    def left(self) -> dict[str, str]:
        """Parents that were left, with reasons."""
        return {parent.name: parent.left for parent in self._parents if parent.left}

    def wants(self, parent: str, index: int) -> bool:
        """Return True if a chunk from this parent was asked for and is missing."""
        return index in self._missing and index in self._by_name[parent].owed

    def begin(self, now: float) -> list[Order | Leave]:
        """Return the first orders."""
        return self._ask(now)

    def arrived(
        self, parent: str, index: int, now: float, *, more: bool = False
    ) -> list[Order | Leave]:
        """Note a chunk, in place if it was wanted; `more`: its parent has others to send."""
        one = self._by_name[parent]
        one.heard, one.behind = now, more
        if one.owed.pop(index, None) is not None:
            self._missing.pop(index, None)
            self._unasked.pop(index, None)
            self._got = now
        if one is self._own:
            self._own_sent = now
            if self._probe is not None:
                self._probe.sent += 1
        return self._judge(now) + self._ask(now)

    def damaged(self, parent: str, index: int, why: str, now: float) -> list[Order | Leave]:
        """Note that a wanted chunk is damaged."""
        one = self._by_name[parent]
        one.heard = now
        one.owed.pop(index, None)
        self._put_back([index])
        one.damaged += 1
        if one.damaged >= _DAMAGED:
            return self._abandon(one, f"sent {one.damaged} damaged chunks: {why}", now)
        return self._ask(now)

    def waiting(self, parent: str, now: float) -> list[Order | Leave]:
        """Note that a parent is alive but does not have what it owes."""
        one = self._by_name[parent]
        one.heard, one.behind = now, False
        return []

    def gone(self, parent: str, why: str, now: float) -> list[Order | Leave]:
        """Note that a parent will never have the version."""
        one = self._by_name[parent]
        one.gone = True
        return self._abandon(one, why, now)

    def tick(self, now: float) -> list[Order | Leave]:
        """Process the passing of time; call it every tenth of the shortest time in `Timing`."""
        if self.done or self.failed:
            return []
        if now - self._began > self._timing.limit_seconds:
            self._fail(f"incomplete after {self._timing.limit_seconds:g} s")
            return []
        if now - self._got > self._timing.stall_seconds:
            self._fail(f"no chunk came for {self._timing.stall_seconds:g} s")
            return []
        orders: list[Order | Leave] = []
        for one in (self._own, self._probe.parent if self._probe is not None else self._own):
            if one.owed and now - one.heard > self._timing.silent_seconds:
                orders += self._abandon(one, f"silent for {now - one.heard:.1f} s", now)
        return orders + self._ask(now)

    def _ask(self, now: float) -> list[Order | Leave]:
        """Keep the window full and begin a probe if one is due."""
        orders: list[Order | Leave] = []
        if self.failed:
            return orders
        while self._unasked and len(self._own.owed) < self._timing.window:
            orders.append(self._order(self._own, next(iter(self._unasked)), now))
        # A probe is due after a pause, or at once if the own parent sends nothing.
        idle = now - max(self._own_sent, self._probed) > self._timing.probe_seconds
        is_due = self._probe is None and self._missing and (idle or now >= self._next_probe)
        if is_due and (above := self._above()) is not None:
            chosen = list(islice(self._unasked, _BURST)) or list(self._missing)[-_BURST:]
            self._probe = _Probe(above, now, set(chosen))
            orders += [self._order(above, index, now) for index in chosen]
        return orders

    def _order(self, parent: _Parent, index: int, now: float) -> Order:
        self._unasked.pop(index, None)
        if not parent.owed:
            parent.heard = now
        parent.owed[index] = now
        return Order(parent.name, index)

    def _above(self) -> _Parent | None:
        above = self._parents[self._parents.index(self._own) + 1 :]
        return next((parent for parent in above if not parent.left), None)

    def _judge(self, now: float) -> list[Order | Leave]:
        probe = self._probe
        if probe is None:
            return []
        probe.chunks &= self._missing.keys()
        if probe.chunks:
            return []
        self._probe, self._probed = None, now
        slower = probe.sent <= 1
        self._lost = self._lost + 1 if slower else 0
        pause = 0.0 if slower else _RARITY * (now - probe.began)
        self._next_probe = now + max(self._timing.probe_seconds, pause)
        # A parent without anything to send reports it; silence is not an excuse.
        starved = not self._own.behind and now - self._own.heard < 2 * WAITING_SECONDS
        if self._lost < self._timing.probes * (_PATIENCE if starved else 1):
            return []
        return self._abandon(self._own, f"slower than {probe.parent.name}", now)

    def _abandon(self, one: _Parent, why: str, now: float) -> list[Order | Leave]:
        """Leave a parent; if it is the own one, the next parent above takes its place."""
        one.left = why
        self._put_back(one.owed)
        one.owed.clear()
        if self._probe is not None and (one is self._own or self._probe.parent is one):
            self._probe = None
        if one is self._own:
            successor = self._above() or self._again()
            if successor is None:
                return [Leave(one.name)]
            self._own, self._lost = successor, 0
            self._probed = self._own_sent = now
            self._next_probe = now + self._timing.probe_seconds
        return [Leave(one.name), *self._ask(now)]

    def _put_back(self, indices: Iterable[int]) -> None:
        missing = (index for index in indices if index in self._missing)
        self._unasked = dict.fromkeys(sorted([*missing, *self._unasked]))

    def _again(self) -> _Parent | None:
        """Begin again with the nearest parent that may have the version; all were left."""
        possible = [parent for parent in self._parents if not parent.gone]
        if not possible:
            self.superseded = True
            self._fail("no parent has it any longer")
            return None
        for parent in possible:
            parent.left, parent.damaged = "", 0
        return possible[0]

    def _fail(self, why: str) -> None:
        states = "; ".join(f"{parent.name}: {parent.left or 'asked'}" for parent in self._parents)
        self.failed = f"{why} ({len(self._missing)} chunks are missing; parents: {states})"
