"""A thread that serves chunks at a limited rate, and runs given functions between two turns."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import zmq

from asyncrl.wire.errors import NoReply, WeightsSupersededError, WireError
from asyncrl.wire.messages.chain import Ask, Gone, Waiting
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights import delta
from asyncrl.wire.weights.chain.cached_version import Held
from asyncrl.wire.weights.chain.serving import Serving, State, Turn
from asyncrl.wire.weights.chain.sockets import ParentSocket


class Pace:
    """Limits a rate to `bytes_per_second` (None: no limit), and `burst` bytes at once."""

    def __init__(self, bytes_per_second: float | None, burst: int, now: float) -> None:
        self._rate = bytes_per_second
        self._burst = float(burst)
        self._left = float(burst)
        self._at = now

    def wait(self, now: float) -> float:
        """Return the seconds until something may be sent."""
        if self._rate is None:
            return 0.0
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, -self._left / self._rate)

    def sent(self, nbytes: int) -> None:
        """Count sent bytes; the next ones wait until these are paid for."""
        self._left -= nbytes


_ASKS, _CHUNKS = 64, 4
"""Messages that are read, and chunks that are sent, before other work gets a turn."""


class Versions(Protocol):
    """The versions that a node can send."""

    def state(self, version: str, index: int) -> State:
        """Return the state of a chunk."""

    def to_send(self, ask: Ask) -> tuple[Held, Held | None]:
        """Return the version of a chunk that is here, and the base for it."""


class Upload:
    """Answers children through one socket."""

    def __init__(
        self, socket: ParentSocket, versions: Versions, pace: Pace, refusals: Refusals
    ) -> None:
        self.socket = socket
        self._versions = versions
        self._pace = pace
        self._refusals = refusals
        self._serving = Serving(versions.state)
        self.sent_bytes = 0

    def take(self, now: float) -> None:
        """Read the requests of children."""
        for _ in range(_ASKS):
            try:
                received = self.socket.receive()
            except zmq.Again:
                return
            if received is not None:
                child, ask = received
                if not self._serving.ask(child, ask, now):
                    error = FrameRefused(Reason.IMPOSSIBLE_EVENT, "it asks for too many chunks")
                    self._refusals.refuse(child, error)

    def send(self, now: float) -> float | None:
        """Send what is due; return seconds until there is more, None if children wait for us."""
        for child, version in self._serving.lost():
            self.socket.send(child, Gone(version, "this node no longer has it"), [])
        for child, version in self._serving.kept_waiting(now):
            if not self.socket.send(child, Waiting(version), []):
                self._serving.forget(child)
        for _ in range(_CHUNKS):
            pause = self._pace.wait(now)
            if pause > 0:
                return pause
            turn = self._serving.next_chunk(now)
            if turn is None:
                return None
            self._send_chunk(turn)
        return 0.0

    def _send_chunk(self, turn: Turn) -> None:
        held, base = self._versions.to_send(turn.ask)
        try:
            chunk, parts = held.encoded(turn.ask.index, base, more=turn.more)
        except WeightsSupersededError as error:
            self.socket.send(turn.child, Gone(turn.ask.version, str(error)), [])
            return
        if not self.socket.send(turn.child, chunk, parts):
            logger.info("%s cannot be reached; its requests are dropped", turn.child)
            self._serving.forget(turn.child)
            return
        nbytes = sum(map(len, parts))
        self._pace.sent(nbytes)
        self.sent_bytes += nbytes


T = TypeVar("T")
V = TypeVar("V", bound=Versions)

logger = logging.getLogger(__name__)

_IO_THREADS = 2
"""One can encrypt outgoing data while the other decrypts incoming data."""
_TICK_SECONDS = 0.05
_CLOSE_SECONDS = 10.0
_BURST = 1 << 20
"""Bytes that a paced node may send at once."""


class ServingThread(Generic[V]):
    """Serves children until it is closed. The versions belong to the thread.

    Port 0 of TCP in `address` is any free one. `keys` are those of this node's hub; None: only for
    children on this machine. `bytes_per_second` limits what it sends. Raises KeyUnusable if the
    address needs keys, zmq.ZMQError if it cannot be bound.
    """

    def __init__(
        self,
        name: str,
        address: str,
        keys: HubKeys | None,
        versions: V,
        bytes_per_second: float | None = None,
    ) -> None:
        delta.warm_up()
        self.name = name
        self._context: zmq.Context[Any] = zmq.Context(_IO_THREADS)
        self._versions = versions
        refusals = Refusals()
        try:
            socket = ParentSocket(self._context, address, keys, refusals)
        except Exception:
            self._context.term()
            raise
        self.address = socket.address
        pace = Pace(bytes_per_second, _BURST, time.monotonic())
        self._outlet = Upload(socket, versions, pace, refusals)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._wake = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._lock = threading.Lock()
        self._closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._poller.register(socket.socket, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"weights-{name}", daemon=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks sent so far."""
        return self._outlet.sent_bytes

    @property
    def is_serving(self) -> bool:
        """True while the thread runs: it was not closed and has not failed."""
        return self._thread.is_alive() and not self._closing

    def close(self) -> None:
        """Stop serving and wait for the thread. Idempotent. Raises NoReply if it is stuck."""
        if self._closing:
            return
        self._closing = True
        self._call(lambda: None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            raise NoReply(f"the thread that serves weights did not end in {_CLOSE_SECONDS:g} s")

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller's
                future.set_exception(error)

        with self._lock:
            if self._wake.closed:
                future.set_exception(WireError(f"{self.name} no longer serves weights"))
            else:
                self._orders.put(run)
                self._wake.send(b"")
        return future

    def _receive(self, now: float) -> None:
        """Receive a version, in subclasses that do."""

    def _end(self) -> None:
        """Release what belongs to the ending thread."""

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            logger.exception("the thread that serves weights ended")
        finally:
            self._closing = True
            self._end()
            with self._lock:
                for socket in (self._woken, self._wake, self._outlet.socket.socket):
                    socket.close(linger=0)
            self._context.term()
            while not self._orders.empty():
                self._orders.get()()

    def _turn(self) -> None:
        pause = self._outlet.send(time.monotonic())
        seconds = _TICK_SECONDS if pause is None else min(pause, _TICK_SECONDS)
        events = dict(self._poller.poll(math.ceil(1000 * seconds)))
        if self._woken in events:
            self._woken.recv()
            self._orders.get()()
        now = time.monotonic()
        self._outlet.take(now)
        self._receive(now)
