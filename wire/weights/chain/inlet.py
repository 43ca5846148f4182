"""The half of a node that asks for the chunks of one version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from asyncrl.wire.messages.chain import Ask, Chunk, Gone, Parent, Waiting
from asyncrl.wire.transport.decoding import FrameRefused
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights.chain.held import Held, Part
from asyncrl.wire.weights.chain.receiving import Leave, Order, Receiving, Timing
from asyncrl.wire.weights.chain.sockets import ChildSocket

_MESSAGES = 8
"""That are read from a parent before something else gets a turn."""


class Inlet:
    """One version on its way, with a socket for each parent that is asked.

    Args:
        context: of the sockets.
        name: of this node.
        held: where the chunks go.
        base: the version that deltas may refer to.
        parents: the nearest first.
        timing: of the receiver.
        now: seconds.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        name: str,
        held: Held,
        base: Held | None,
        parents: Sequence[Parent],
        timing: Timing,
        now: float,
    ) -> None:
        self._context, self._name = context, name
        self._held, self._base = held, base
        self._parents = {parent.name: parent for parent in parents}
        self._refusals = Refusals()
        self._sockets: dict[str, ChildSocket] = {}
        self.received_bytes = 0
        self.receiving = Receiving(held.grid.count, list(self._parents), timing, now)
        self._obey(self.receiving.begin(now))

    @property
    def sockets(self) -> dict[zmq.Socket[Any], str]:
        """Those that can be polled, and their parents."""
        return {socket.socket: name for name, socket in self._sockets.items()}

    def take(self, parent: str, now: float) -> None:
        """Read what a parent sent."""
        for _ in range(_MESSAGES):
            socket = self._sockets.get(parent)
            if socket is None:  # it was left meanwhile
                return
            try:
                received = socket.receive()
            except zmq.Again:
                return
            if received is not None:
                self._obey(self._handle(parent, *received, now))
            elif self._refusals.is_cut_off(parent):
                self._obey(self.receiving.gone(parent, "too many of its frames were refused", now))

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._obey(self.receiving.tick(now))

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        while self._sockets:
            self._sockets.popitem()[1].socket.close()

    def _handle(
        self, parent: str, message: Chunk | Waiting | Gone, parts: list[Part], now: float
    ) -> list[Order | Leave]:
        if message.version != self._held.name:
            return []
        if isinstance(message, Waiting):
            return self.receiving.waiting(parent, now)
        if isinstance(message, Gone):
            return self.receiving.gone(parent, message.why[:200], now)
        if self.receiving.wants(parent, message.index):
            try:
                self._held.receive(message, parts, self._base)
            except FrameRefused as error:
                self._refusals.refuse(parent, error)
                return self.receiving.damaged(parent, message.index, str(error), now)
        self.received_bytes += sum(map(len, parts))
        return self.receiving.arrived(parent, message.index, now, more=message.more)

    def _obey(self, orders: list[Order | Leave]) -> None:
        base = None if self._base is None else self._base.name
        for order in orders:
            if isinstance(order, Leave):
                if order.parent in self._sockets:
                    self._sockets.pop(order.parent).socket.close()
                continue
            if order.parent not in self._sockets:
                self._sockets[order.parent] = ChildSocket(
                    self._context,
                    self._name,
                    self._parents[order.parent],
                    self._refusals,
                    self._held.grid.chunk_bytes,
                )
            self._sockets[order.parent].send(Ask(self._held.name, order.index, base))
