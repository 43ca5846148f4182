"""Receives versions from other nodes into this node's memory, and passes them on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from asyncrl.wire.errors import WeightsNotReceivedError, WeightsSupersededError, WireError
from asyncrl.wire.messages.chain import Ask, Chunk, Gone, Parent, Waiting
from asyncrl.wire.transport.decoding import FrameRefused
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights.chain.cached_version import Held, Part
from asyncrl.wire.weights.chain.node_files import NodeFiles
from asyncrl.wire.weights.chain.receiving import Leave, Order, Receiving, Timing
from asyncrl.wire.weights.chain.sockets import ChildSocket
from asyncrl.wire.weights.chain.thread import ServingThread
from asyncrl.wire.weights.chunks import CHUNK_BYTES, name_of
from asyncrl.wire.weights.layout import WeightManifest

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


@dataclass(frozen=True, slots=True)
class Received:
    """A version is in this node's memory."""

    manifest: WeightManifest
    """Of the file on this node."""
    seconds: float
    nbytes: int
    """That came over the network."""
    left: dict[str, str]
    """Parents that were left, and why: they belong at the end of the next chain."""


@dataclass(slots=True)
class _Fetch:
    manifest: WeightManifest
    parents: tuple[Parent, ...]
    future: Future[Received]
    inlet: Inlet
    began: float


class WeightNode(ServingThread[NodeFiles]):
    """A thread with two files in memory, of which one holds the newest whole version.

    Args:
        name: of this node.
        address: to bind; port 0 of TCP: any that is free.
        keys: of this node's hub; None: only for children on this machine.
        directory: for the files, in memory.
        files_id: names the files; unique on this machine.
        timing: of the receiver.
        bytes_per_second: that it may send; None: no limit.
        chunk_bytes: of every node of the chain.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: HubKeys | None,
        *,
        directory: Path,
        files_id: str,
        timing: Timing | None = None,
        bytes_per_second: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        files = NodeFiles(directory, files_id, chunk_bytes)
        super().__init__(name, address, keys, files, bytes_per_second)
        self._timing = timing or Timing()
        self._fetch: _Fetch | None = None
        self._polled: set[zmq.Socket[bytes]] = set()
        self._start()

    def fetch(
        self, manifest: WeightManifest, parents: Sequence[Parent], *, deltas: bool = True
    ) -> Future[Received]:
        """Bring a version here from the nearest parent that can give it; as it changed, if told so.

        What is still on its way is given up, unless it is the same version from the same parents.
        The future fails with

        - WeightsSupersededError: another version was asked for, or nobody has this one any longer;
        - WeightsNotReceivedError: it did not arrive in time;
        - PublishError: there is no memory for it; or another error of `asyncrl.wire.errors`.
        """
        future: Future[Received] = Future()
        begun = self._call(lambda: self._begin(manifest, parents, future, deltas=deltas))
        begun.add_done_callback(lambda done: _pass_on(done, future))
        return future

    def _begin(
        self,
        manifest: WeightManifest,
        parents: Sequence[Parent],
        future: Future[Received],
        *,
        deltas: bool,
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        name = name_of(manifest)
        if self._closing:
            raise WeightsNotReceivedError(f"{self.name} was closed")
        here = self._versions.local(name)
        if here is not None:
            future.set_result(Received(here, 0.0, 0, {}))
            return
        asked = tuple(parents)
        if (
            self._fetch is not None
            and name_of(self._fetch.manifest) == name
            and self._fetch.parents == asked
        ):
            self._fetch.future.add_done_callback(lambda done: _copy(done, future))
            return
        self._stop(WeightsSupersededError(f"{self.name} was told to fetch version {name} instead"))
        held = self._versions.begin(manifest)
        base = self._versions.base if deltas else None
        now = time.monotonic()
        try:
            inlet = Inlet(self._context, self.name, held, base, parents, self._timing, now)
        except Exception:
            self._versions.give_up()
            raise
        self._fetch = _Fetch(manifest, asked, future, inlet, now)

    def _receive(self, now: float) -> None:
        fetch = self._fetch
        if fetch is None:
            return
        for parent in list(fetch.inlet.sockets.values()):
            fetch.inlet.take(parent, now)
        fetch.inlet.tick(now)
        receiving = fetch.inlet.receiving
        if receiving.failed:
            kind = WeightsSupersededError if receiving.superseded else WeightsNotReceivedError
            self._stop(
                kind(
                    f"weights of version {fetch.manifest.policy_version} did not arrive at "
                    f"{self.name}: {receiving.failed}"
                )
            )
        elif receiving.done:
            fetch.inlet.close()
            self._fetch = None
            received = Received(
                self._versions.finish(),
                now - fetch.began,
                fetch.inlet.received_bytes,
                receiving.left,
            )
            fetch.future.set_result(received)
        self._poll_parents()

    def _poll_parents(self) -> None:
        """Wake up for the parents that are asked now."""
        wanted = set() if self._fetch is None else set(self._fetch.inlet.sockets)
        for socket in self._polled - wanted:
            self._poller.unregister(socket)
        for socket in wanted - self._polled:
            self._poller.register(socket, zmq.POLLIN)
        self._polled = wanted

    def _stop(self, error: WireError) -> None:
        """Give up the version that is on its way."""
        fetch, self._fetch = self._fetch, None
        self._versions.give_up()
        if fetch is not None:
            fetch.inlet.close()
            self._poll_parents()
            fetch.future.set_exception(error)

    def _end(self) -> None:
        self._stop(WeightsNotReceivedError(f"{self.name} was closed"))
        self._versions.close()


def _pass_on(begun: Future[None], future: Future[Received]) -> None:
    """A version that could not be begun fails as that."""
    error = begun.exception()
    if error is not None and not future.done():
        future.set_exception(error)


def _copy(done: Future[Received], future: Future[Received]) -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
