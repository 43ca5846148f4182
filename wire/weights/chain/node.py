"""Receives versions from other nodes into this node's memory, and passes them on.

A node has two files: its engines read one while the next version arrives in the other.
"""

import mmap
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from asyncrl.wire.errors import WeightsNotReceivedError, WeightsSupersededError, WireError
from asyncrl.wire.messages.chain import Ask, Chunk, Gone, Parent, Waiting
from asyncrl.wire.transport.decoding import FrameRefused
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights.chain.cached_version import Held, Part
from asyncrl.wire.weights.chain.receiving import Leave, Order, Receiving, Timing
from asyncrl.wire.weights.chain.serving import State
from asyncrl.wire.weights.chain.sockets import ChildSocket
from asyncrl.wire.weights.chain.thread import ServingThread
from asyncrl.wire.weights.chunks import CHUNK_BYTES, Grid, alike, name_of, trainer_of
from asyncrl.wire.weights.files import mark, reserve
from asyncrl.wire.weights.layout import WRITING, WeightManifest

_PAST = 64


@dataclass(slots=True)
class _File:
    path: Path
    trainer: str = ""
    memory: mmap.mmap | None = None
    held: Held | None = None


class NodeFiles:
    """Versions of one run in this node's memory, in the trainer's layout.

    The header of a file names a version only while the complete version is in it. A trainer that
    replaces another may publish a number again, so each has separate files. `directory` is in
    memory, usually /dev/shm; `files_id` is unique here; `chunk_bytes` is the same in every node.
    """

    def __init__(self, directory: Path, files_id: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._prefix = str(directory / f"asyncrl-{files_id}-weights-")
        self._files = [_File(Path(f"{self._prefix}{i}")) for i in range(2)]
        self._numbers = len(self._files)
        self._chunk_bytes = chunk_bytes
        self._newest: _File | None = None
        self._arriving: _File | None = None
        self._past: dict[str, None] = {}

    @property
    def base(self) -> Held | None:
        """The complete version that a delta to the arriving one may refer to."""
        one, other = self._newest, self._arriving
        if one is None or one.held is None or other is None or other.held is None:
            return None
        return one.held if alike(one.held.manifest, other.held.manifest) else None

    def begin(self, manifest: WeightManifest) -> Held:
        """Make room for a version. Raises PublishError, or WeightsReadError for its size."""
        grid = Grid(manifest.nbytes, self._chunk_bytes)
        self.give_up()
        file = next(file for file in self._files if file is not self._newest)
        self._drop(file)
        self._belong_to(file, trainer_of(manifest))
        if file.memory is None or len(file.memory) != manifest.nbytes:
            file.memory = None  # freed with its last reader
            file.memory = reserve(file.path, manifest.nbytes, of=len(self._files))
        memory = file.memory
        mark(memory, WRITING)
        file.held = Held(
            manifest, np.frombuffer(memory, np.uint8), lambda: True, grid, set(range(grid.count))
        )
        self._past.pop(file.held.name, None)
        self._arriving = file
        return file.held

    def finish(self) -> WeightManifest:
        """Let engines read the arriving version, which is complete; return its manifest here."""
        file = self._arriving
        if file is None or file.held is None or file.held.missing or file.memory is None:
            raise ValueError("no version has arrived completely")
        mark(file.memory, file.held.manifest.policy_version)
        self._newest, self._arriving = file, None
        return msgspec.structs.replace(file.held.manifest, path=str(file.path))

    def give_up(self) -> None:
        """Forget the arriving version. Idempotent."""
        if self._arriving is not None:
            self._drop(self._arriving)
            self._arriving = None

    def local(self, version: str) -> WeightManifest | None:
        """Return this node's manifest of a version if it is the newest complete one."""
        file = self._newest
        if file is None or file.held is None or file.held.name != version:
            return None
        return msgspec.structs.replace(file.held.manifest, path=str(file.path))

    def state(self, version: str, index: int) -> State:
        """Return the state of a chunk. An unknown version may still come."""
        held = self._by_name(version)
        if held is None:
            return State.GONE if version in self._past else State.COMING
        if index >= held.grid.count:
            return State.GONE
        return State.COMING if index in held.missing else State.HERE

    def to_send(self, ask: Ask) -> tuple[Held, Held | None]:
        """Return the version of a chunk that is here, and the base for it."""
        held = self._by_name(ask.version)
        if held is None:
            raise KeyError(ask.version)
        base = None if ask.base is None else self._by_name(ask.base)
        same = base is not None and alike(base.manifest, held.manifest)
        return held, base if same else None

    def close(self) -> None:
        """Remove the files. A reader that has one open can finish. Idempotent."""
        self._newest = self._arriving = None
        for file in self._files:
            file.held = None
            if file.memory is not None:
                file.memory = None
                file.path.unlink(missing_ok=True)

    def _belong_to(self, file: _File, trainer: str) -> None:
        if file.trainer not in ("", trainer):
            file.memory = None
            file.path.unlink(missing_ok=True)
            file.path = Path(f"{self._prefix}{self._numbers}")
            self._numbers += 1
        file.trainer = trainer

    def _by_name(self, version: str) -> Held | None:
        held = (file.held for file in self._files if file.held is not None)
        return next((one for one in held if one.name == version), None)

    def _drop(self, file: _File) -> None:
        if file.held is not None:
            self._past[file.held.name] = None
            file.held = None
        while len(self._past) > _PAST:
            del self._past[next(iter(self._past))]
        if file.memory is not None:
            mark(file.memory, WRITING)


_MESSAGES = 8
"""Messages read from a parent before other work gets a turn."""


class Download:
    """One arriving version, with a socket for each parent that is asked, the nearest first."""

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
        """Sockets to poll, and their parents."""
        return {socket.socket: name for name, socket in self._sockets.items()}

    def take(self, parent: str, now: float) -> None:
        """Process the messages of a parent."""
        for _ in range(_MESSAGES):
            socket = self._sockets.get(parent)
            if socket is None:  # it was left since
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
        """Process the passing of time."""
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
                parent, size = self._parents[order.parent], self._held.grid.chunk_bytes
                self._sockets[order.parent] = ChildSocket(
                    self._context, self._name, parent, self._refusals, size
                )
            self._sockets[order.parent].send(Ask(self._held.name, order.index, base))


@dataclass(frozen=True, slots=True)
class Received:
    """A version that has arrived in this node's memory."""

    manifest: WeightManifest
    seconds: float
    nbytes: int
    """Bytes that came over the network."""
    left: dict[str, str]
    """Parents that were left, with reasons: they belong at the end of the next chain."""


@dataclass(slots=True)
class _Fetch:
    policy_version: int
    asked: tuple[str, tuple[Parent, ...]]
    future: Future[Received]
    inlet: Download
    began: float


class WeightNode(ServingThread[NodeFiles]):
    """A thread with two files in memory; see `ServingThread` and `NodeFiles` for the arguments."""

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
        self._thread.start()

    def fetch(
        self, manifest: WeightManifest, parents: Sequence[Parent], *, deltas: bool = True
    ) -> Future[Received]:
        """Bring a version here from the nearest parent that can give it; as deltas if allowed.

        A version that is still arriving is given up, unless it is the same from the same parents.
        The future fails with WeightsSupersededError if another version was asked for, or no parent
        has this one any longer; WeightsNotReceivedError if it did not arrive in time; PublishError
        if there is no memory for it; or another error of `asyncrl.wire.errors`.
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
        asked = name, tuple(parents)
        if self._fetch is not None and self._fetch.asked == asked:
            self._fetch.future.add_done_callback(lambda done: _copy(done, future))
            return
        self._stop(WeightsSupersededError(f"{self.name} fetches version {name} instead"))
        held = self._versions.begin(manifest)
        base, now = self._versions.base if deltas else None, time.monotonic()
        try:
            inlet = Download(self._context, self.name, held, base, parents, self._timing, now)
        except Exception:
            self._versions.give_up()
            raise
        self._fetch = _Fetch(manifest.policy_version, asked, future, inlet, now)

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
            what = f"weights of version {fetch.policy_version} did not arrive at {self.name}"
            self._stop(kind(f"{what}: {receiving.failed}"))
        elif receiving.done:
            fetch.inlet.close()
            self._fetch = None
            here, seconds = self._versions.finish(), now - fetch.began
            got = Received(here, seconds, fetch.inlet.received_bytes, receiving.left)
            fetch.future.set_result(got)
        self._poll_parents()

    def _poll_parents(self) -> None:
        wanted = set() if self._fetch is None else set(self._fetch.inlet.sockets)
        for socket in self._polled - wanted:
            self._poller.unregister(socket)
        for socket in wanted - self._polled:
            self._poller.register(socket, zmq.POLLIN)
        self._polled = wanted

    def _stop(self, error: WireError) -> None:
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
    error = begun.exception()
    if error is not None and not future.done():
        future.set_exception(error)


def _copy(done: Future[Received], future: Future[Received]) -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
