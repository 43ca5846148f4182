"""Decides which node fetches new weights from which. Pure: no clock, no sockets.

    published ──► Serve (the relay of the trainer's node), Fetch, Fetch, ... (the others, a chain)
    arrived   ──► the version can be installed on that node; if a newer one was published: Fetch
    failed    ──► Fetch again ──► GiveUp (the relay is to be replaced) ──► Hopeless (the run fails)

The nodes form a row, each behind those that it asks: the nearest first, the trainer's last.

- A node that others have left because it was slow or silent is last in the next row.
- A node that fetches a version ends that before it begins with a newer one, so that it makes
  progress even if versions come faster than it can fetch them. Versions of a lost trainer are given
  up.
- A joiner, or a relay that replaces another one, asks the nearest nodes that have the version.
- When the source of a version is replaced, fetches begin anew: its address changed.
- If no peer still has the version, the node waits for the next one, or asks again at `again`: the
  announcement of a newer one may be on its way.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrl.wire.weights.chunks import name_of, trainer_of
from asyncrl.wire.weights.layout import WeightManifest

MAX_TRIES = 3
"""Failures in a row after which a relay is given up; after twice as many the node is."""


@dataclass(frozen=True, slots=True)
class RelayPlace:
    """A relay that is ready."""

    name: str
    source: str
    node: str
    """Address of the weights that its node has received."""


@dataclass(frozen=True, slots=True)
class Serve:
    """The relay on the trainer's node serves the version."""

    relay: str
    manifest: WeightManifest
    attempt: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The trainer of this relay's node is gone."""

    relay: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """The relay fetches the version."""

    relay: str
    manifest: WeightManifest
    parents: tuple[tuple[str, str], ...]
    """Name and address of the relays to ask, the nearest first."""
    attempt: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The relay failed too often; another one may do better."""

    relay: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hopeless:
    """No relay of this node gets the weights."""

    node: str
    reason: str


Order = Serve | Forget | Fetch | GiveUp | Hopeless


@dataclass(slots=True)
class _Node:
    relay: RelayPlace
    here: WeightManifest | None = None
    """Manifest of the newest complete file on it."""
    version: str = ""
    fetching: str = ""
    attempt: int = -1
    waits: bool = False


@dataclass(slots=True)
class WeightRoutes:
    """The routes of one run."""

    _newest: WeightManifest | None = None
    _name: str = ""
    _home: str | None = None
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _row: list[str] = field(default_factory=list)
    _left: set[str] = field(default_factory=set)
    _failures: dict[str, int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def manifest_at(self, node: str) -> WeightManifest | None:
        """Return the current trainer's newest weights that processes of a node can read, if any."""
        if self._newest is None or node == self._home:
            return self._newest
        one = self._nodes.get(node)
        return one.here if one is not None and one.version else None

    def relay_ready(self, node: str, relay: RelayPlace) -> list[Order]:
        """Note a node's relay, a first one or a replacement."""
        self._nodes[node] = _Node(relay)
        if node not in self._row:
            self._row.append(node)
        if node != self._home:
            return self._fetch(node)
        for one in self._nodes.values():
            one.fetching = ""
        return self._serve() + self._fetch_all()

    def relay_lost(self, node: str) -> None:
        """Forget a node's relay and its file, until `relay_ready`. Its children notice."""
        self._nodes.pop(node, None)

    def published(self, manifest: WeightManifest, home: str) -> list[Order]:
        """Note a version that the trainer on this node has published."""
        if self._newest is None or trainer_of(manifest) != trainer_of(self._newest):
            self._drop_all()
        self._newest, self._name, self._home = manifest, name_of(manifest), home
        self._failures.pop(home, None)  # nothing arrives there; its next order is new
        self._row.sort(key=lambda node: node in self._left)
        self._left.clear()
        return self._serve() + self._fetch_all()

    def trainer_lost(self) -> list[Order]:
        """Forget the versions of the lost trainer; another one may publish others."""
        home = self._nodes.get(self._home) if self._home is not None else None
        self._drop_all()
        self._newest, self._name, self._home = None, "", None
        return [] if home is None else [Forget(home.relay.name)]

    def arrived(
        self, relay: str, attempt: int, manifest: WeightManifest, left: set[str]
    ) -> list[Order]:
        """Note that a version is on a node.

        `attempt` is the number of the order; answers to others than the last one are ignored.
        `left` are relays that the node's relay left on the way.
        """
        node = self._asked(relay, attempt)
        if node is None:
            return []
        one = self._nodes[node]
        one.here, one.version, one.fetching = manifest, one.fetching, ""
        self._failures.pop(node, None)
        self._left |= {name for name, other in self._nodes.items() if other.relay.name in left}
        return self._fetch(node)

    def failed(self, relay: str, attempt: int, reason: str, *, superseded: bool) -> list[Order]:
        """Note that an order failed; `superseded`: no node has the version any longer."""
        node = self._asked(relay, attempt)
        if node is None:
            return []
        one = self._nodes[node]
        was_newest = one.fetching in ("", self._name)
        one.fetching = ""
        if superseded:
            one.waits = was_newest
            return self._fetch(node)
        failures = self._failures[node] = self._failures.get(node, 0) + 1
        if failures >= 2 * MAX_TRIES:
            return [Hopeless(node, reason)]
        if failures % MAX_TRIES == 0 or node == self._home:
            return [GiveUp(relay, reason)]
        return self._fetch(node)

    def again(self) -> list[Order]:
        """Retry, after some time, on nodes that found the newest version nowhere."""
        orders: list[Order] = []
        for node in self._row:
            if node in self._nodes and self._nodes[node].waits:
                self._nodes[node].waits = False
                orders += self._serve() if node == self._home else self._fetch(node)
        return orders

    def _asked(self, relay: str, attempt: int) -> str | None:
        asked = ((node, (one.relay.name, one.attempt)) for node, one in self._nodes.items())
        return next((node for node, order in asked if order == (relay, attempt)), None)

    def _drop_all(self) -> None:
        for one in self._nodes.values():
            one.here, one.version, one.fetching, one.attempt = None, "", "", -1

    def _serve(self) -> list[Order]:
        home = self._nodes.get(self._home) if self._home is not None else None
        if home is None or self._newest is None:
            return []
        home.attempt = next(self._numbers)
        return [Serve(home.relay.name, self._newest, home.attempt)]

    def _fetch_all(self) -> list[Order]:
        orders: list[Order] = []
        for node in self._row:
            if node in self._nodes:
                self._nodes[node].waits = False
                orders += self._fetch(node)
        return orders

    def _fetch(self, node: str) -> list[Order]:
        one = self._nodes[node]
        if self._newest is None or node == self._home or one.fetching or one.waits:
            return []
        parents = self._parents(node)
        if one.version == self._name or not parents:
            return []
        one.fetching, one.attempt = self._name, next(self._numbers)
        return [Fetch(one.relay.name, self._newest, parents, one.attempt)]

    def _parents(self, node: str) -> tuple[tuple[str, str], ...]:
        """Return nodes that have the newest version, nearest first; then the source.

        Nodes before this one may also be fetching it: no two nodes wait for each other.
        """
        here = self._row.index(node)
        found = []
        for place, name in enumerate(self._row):
            one = self._nodes.get(name)
            if one is None or name in (node, self._home):
                continue
            comes = place < here and one.fetching == self._name
            if one.version == self._name or comes:
                found.append((abs(place - here), place > here, one.relay))
        parents = [(relay.name, relay.node) for *_, relay in sorted(found, key=lambda one: one[:2])]
        source = self._nodes.get(self._home) if self._home is not None else None
        if source is not None:
            parents.append((source.relay.name, source.relay.source))
        return tuple(parents)
