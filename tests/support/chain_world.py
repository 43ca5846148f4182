"""A chain of nodes in simulated time: the real machines, with links that are slow, cut or dead.

Time goes in ticks of 1 ms. Each node's uplink sends one chunk at a time, which takes `ticks` of the
node; messages arrive a tick after they were sent. A cut link loses what is sent over it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from asyncrl.wire.messages.chain import Ask
from asyncrl.wire.weights.chain.receiving import Leave, Order, Receiving, Timing
from asyncrl.wire.weights.chain.serving import Serving, State

TIMING = Timing(window=8, silent_seconds=0.8, probe_seconds=0.05, limit_seconds=6.0)
SOURCE = "n0"
_PERIOD = 5
"""Ticks between looks of a receiver at the time."""


@dataclass
class Node:
    name: str
    count: int
    ticks: int
    """That a chunk takes on its uplink."""
    dies: int | None = None
    receiving: Receiving | None = None
    have: set[int] = field(default_factory=set)
    sending: tuple[int, str, int, str] | None = None
    """When the chunk that is being sent has left, to whom it goes, which, and the message."""
    sent: int = 0
    gave_up: bool = False
    finished: float | None = None

    def __post_init__(self) -> None:
        self.serving = Serving(self.state)

    def state(self, version: str, index: int) -> State:
        if index in self.have:
            return State.HERE
        return State.GONE if self.gave_up else State.COMING


class World:
    """Nodes n0 (the source) to n-k. `damage(sender, index)` says whether a chunk is damaged."""

    def __init__(
        self,
        count: int,
        ticks: list[int],
        *,
        dies: dict[int, int] | None = None,
        cut: dict[tuple[int, int], tuple[int, int]] | None = None,
        liars: frozenset[int] = frozenset(),
        timing: Timing = TIMING,
        source_loses: int | None = None,
    ) -> None:
        self.count, self.timing = count, timing
        self.cut = {(f"n{a}", f"n{b}"): span for (a, b), span in (cut or {}).items()}
        self.liars = {f"n{i}" for i in liars}
        self.source_loses: float = math.inf if source_loses is None else source_loses
        self.nodes: dict[str, Node] = {}
        self.tick = 0
        self.mail: deque[tuple[int, str, str, tuple[str, int]]] = deque()
        for i, slowness in enumerate(ticks):
            node = self.nodes[f"n{i}"] = Node(f"n{i}", count, slowness, (dies or {}).get(i))
            if i == 0:
                node.have = set(range(count))
                continue
            parents = [f"n{j}" for j in range(i - 1, -1, -1)]
            node.receiving = Receiving(count, parents, timing, 0.0)

    def alive(self, name: str) -> bool:
        dies = self.nodes[name].dies
        return dies is None or self.tick < dies

    def _post(self, sender: str, to: str, what: tuple[str, int]) -> None:
        pair = (sender, to) if (sender, to) in self.cut else (to, sender)
        first, last = self.cut.get(pair, (0, 0))
        if not first <= self.tick < last:
            self.mail.append((self.tick + 1, sender, to, what))

    def _obey(self, node: Node, orders: list[Order | Leave]) -> None:
        for order in orders:
            if isinstance(order, Order):
                self._post(node.name, order.parent, ("ask", order.index))

    def _deliver(self, sender: str, to: str, what: tuple[str, int]) -> None:
        node, (kind, index), now = self.nodes[to], what, self.tick / 1000
        if kind == "ask":
            assert node.serving.ask(sender, Ask("v", index), now)
            return
        receiving = node.receiving
        assert receiving is not None
        if receiving.done or receiving.failed:
            return
        if kind == "waiting":
            orders = receiving.waiting(sender, now)
        elif kind == "gone":
            orders = receiving.gone(sender, "it is gone", now)
        elif receiving.wants(sender, index) and sender in self.liars:
            orders = receiving.damaged(sender, index, "its checksum differs", now)
        else:
            if receiving.wants(sender, index):
                node.have.add(index)
            orders = receiving.arrived(sender, index, now, more=kind == "chunk+")
        self._obey(node, orders)

    def _step(self, node: Node) -> None:
        now = self.tick / 1000
        if node.name == SOURCE and self.tick >= self.source_loses:
            node.have, node.gave_up = set(), True
        if node.receiving is not None and node.finished is None:
            if self.tick == 0:
                self._obey(node, node.receiving.begin(now))
            if self.tick % _PERIOD == 0:
                self._obey(node, node.receiving.tick(now))
            if node.receiving.done or node.receiving.failed:
                node.finished = now
                node.gave_up = bool(node.receiving.failed)
        if node.sending is not None and node.sending[0] <= self.tick:
            _, to, index, kind = node.sending
            self._post(node.name, to, (kind, index))
            node.sending, node.sent = None, node.sent + 1
        if node.sending is None and (chosen := node.serving.next_chunk(now)) is not None:
            kind = "chunk+" if chosen.more else "chunk"
            node.sending = (self.tick + node.ticks, chosen.child, chosen.ask.index, kind)
        for child, _ in node.serving.lost():
            self._post(node.name, child, ("gone", 0))
        for child, _ in node.serving.kept_waiting(now):
            self._post(node.name, child, ("waiting", 0))

    def run(self) -> World:
        """Until every living node has the version or has failed."""
        limit = 1000 * self.timing.limit_seconds + 50
        while any(n.receiving and n.finished is None for n in self.living()):
            assert self.tick <= limit, "a node neither has the version nor says why not"
            for name in self.nodes:
                if self.alive(name):
                    self._step(self.nodes[name])
            self.tick += 1
            while self.mail and self.mail[0][0] <= self.tick:
                _, sender, to, what = self.mail.popleft()
                if self.alive(to):
                    self._deliver(sender, to, what)
            if not self.mail and not any(node.sending for node in self.nodes.values()):
                self.tick += -self.tick % _PERIOD  # nothing happens before
        return self

    def living(self) -> list[Node]:
        return [node for name, node in self.nodes.items() if self.alive(name)]

    def seconds(self, i: int) -> float:
        finished = self.nodes[f"n{i}"].finished
        assert finished is not None
        return finished

    def whole(self, i: int) -> bool:
        return len(self.nodes[f"n{i}"].have) == self.count
