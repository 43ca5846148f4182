"""Two kinds of socket: a `Hub` that many peers connect to, and a `Line` to one hub.

Every connection is encrypted and authenticated, and the name of a peer is bound to a key
(`wire.transport.keys`). A frame that is not an accepted message is refused: `Refusals` counts it,
logs it, and cuts off a peer that keeps sending such frames. `receive` never raises because of a
peer's frame. Long messages travel in parts, and short ones that are sent in one turn of the event
loop with `send_soon` travel together (`wire.transport.outbox`). Children of other nodes reach a hub
through relays (`asyncrl.wire.sessions`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from asyncrl.wire.errors import FolderNotPrivate, KeyUnusable, NoReply, SessionFull, Unreachable
from asyncrl.wire.sessions.peers import EXTRA_BYTES, SessionPeers, is_bundle
from asyncrl.wire.transport.addresses import is_private
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason
from asyncrl.wire.transport.keys import HubKeys, LineKeys
from asyncrl.wire.transport.outbox import MAX_BYTES, Outbox, join, split
from asyncrl.wire.transport.refusals import NO_PASS, Refusals

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ERROR = FrameRefused(
    Reason.UNAUTHENTICATED, "its handshake failed: it does not have the run's key, or is not a peer"
)


class HandshakeWatch:
    """Counts the failed handshakes of a socket, from before it is bound."""

    def __init__(self, socket: zmq.asyncio.Socket, refusals: Refusals) -> None:
        self._socket = socket
        self._refusals = refusals
        address = f"inproc://handshakes-{id(self)}"
        socket.monitor(address, _FAILED)
        self._events = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # with a limit, the socket's own thread would wait
        self._events.connect(address)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, in the running event loop. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self._events.recv_multipart()
            self._refusals.note("a new connection", _ERROR)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Stop watching; call this before the socket is closed."""
        if self._task is not None:
            self._task.cancel()
        self._socket.disable_monitor()
        self._events.close(linger=0)


In = TypeVar("In")

logger = logging.getLogger(__name__)

_HIGH_WATER = 100_000
"""Messages queued per peer before a send fails. The scheduler's bounds stay far below it."""
HUB_BYTES = 16 << 20
"""Longest message that a hub accepts by default. The longest on the control plane lists the tensors
of a model."""
LINE_BYTES = 64 << 20
"""Longest message that a hub may send to its peers, which includes whole dataset examples."""
_CURVE_KEY = 40
_LOG_SECONDS = 1.0
_TICK_SECONDS = 0.05
"""Interval between checks of sessions that have something to acknowledge or resend."""
_TURN = 64
"""Messages received before other tasks get a turn, even if more are waiting."""


def identify(socket: zmq.Socket[Any], keys: LineKeys) -> None:
    """Give an unconnected socket the name and the keys of a hub's peer."""
    socket.setsockopt(zmq.IDENTITY, keys.identity)
    socket.curve_serverkey = keys.hub
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def error_of(sending: Awaitable[Any]) -> BaseException | None:
    """Return why a message was not sent. A non-blocking send has ended when it returns."""
    return cast("asyncio.Future[Any]", sending).exception()


class Hub(Generic[In]):
    """The end that binds. Peers are known by the name with which they connect.

    `incoming` is the union of the message types that peers may send, of at most `max_bytes`: ZeroMQ
    closes the connection of a peer that announces a longer part, before it allocates memory for it.
    `queued` messages may wait in each direction, for each peer. `is_relay` returns True if a peer
    of this name may pass on frames of others, which have their own passes. Raises KeyUnusable if
    `keys` are missing; then nothing listens, at any address.
    """

    def __init__(
        self,
        address: str,
        keys: HubKeys,
        incoming: Any,
        refusals: Refusals | None = None,
        *,
        max_bytes: int = HUB_BYTES,
        queued: int = _HIGH_WATER,
        is_relay: Callable[[str], bool] = lambda _: False,
    ) -> None:
        if len(keys.secret) != _CURVE_KEY:
            raise KeyUnusable(f"nothing listens at {address} without a CURVE key")
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._socket.set_hwm(queued)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.secret
        self._keys = keys
        self.refusals = Refusals() if refusals is None else refusals
        self._handshakes = HandshakeWatch(self._socket, self.refusals)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:  # the port is in use, or the address is of no network here
            self._handshakes.close()
            self._socket.close(linger=0)
            raise
        self._received = self._refused = 0
        self._max_bytes = max_bytes
        self._decoder: FrameDecoder[In] = FrameDecoder(incoming, max_bytes=max_bytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._ready: deque[tuple[str, In]] = deque()
        self._outbox = Outbox(self._send_body)
        self._is_relay = is_relay
        self.sessions = SessionPeers(keys, self.refusals, self._try_to_send)
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: dict[str, float] = {}

    @property
    def address(self) -> str:
        """The bound address, with the port that the system chose for `tcp://HOST:*`."""
        return cast("bytes", self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def listen_again(self) -> bool:
        """Bind again if the file of its Unix socket was removed; return True if it was.

        Open connections stay. If its folder is missing too, nothing is done. Raises
        FolderNotPrivate if others can access the folder, Unreachable if it cannot be bound.
        """
        address = self.address
        file = Path(address.removeprefix("ipc://"))
        if not address.startswith("ipc://") or file.exists() or not file.parent.is_dir():
            return False
        if not is_private(file.parent):
            raise FolderNotPrivate(f"{file.parent} can be accessed by others")
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise Unreachable(f"{address} cannot be bound again: {error.strerror}") from error
        return True

    def send_soon(self, peer: str, message: msgspec.Struct) -> None:
        """Send to one peer at the end of this turn of the event loop; dropped if not connected."""
        self._outbox.add(peer, message)

    def _send_body(self, peer: str, body: bytes) -> None:
        if peer in self.sessions:
            if not self.sessions.leaving:
                asyncio.get_running_loop().call_soon(self.sessions.flush)
            self._send_in_session(peer, body)
        elif (error := self._try_to_send(peer, body)) is not None:
            now = time.monotonic()
            if now - self._unsent.get(peer, -_LOG_SECONDS) >= _LOG_SECONDS:
                self._unsent[peer] = now
                logger.warning("a message could not be sent to %s: %s", peer, error)

    def _send_in_session(self, peer: str, body: bytes) -> None:
        try:
            self.sessions.send(peer, body, time.monotonic())
        except SessionFull as error:
            self.refusals.cut_off(peer, f"does not acknowledge its messages: {error}")
        self._look_after_sessions()

    def _look_after_sessions(self) -> None:
        if self._timer is None and self.sessions.active:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.sessions.tick(time.monotonic())
        self.sessions.flush()
        self._look_after_sessions()

    def abandon(self, peer: str) -> None:
        """Drop everything that is kept for a peer that is gone for good."""
        self.sessions.abandon(peer)

    def _try_to_send(self, peer: str, body: bytes) -> BaseException | None:
        """Send a frame; return the error if it was not sent. A session sends it again."""
        parts = [self._keys.identity_of(peer), *split(body)]
        return error_of(self._socket.send_multipart(parts, flags=zmq.NOBLOCK))

    async def send(self, peer: str, message: msgspec.Struct | msgspec.Raw) -> None:
        """Send to one peer, `Raw` if encoded already. Raises Unreachable if it is not connected."""
        self._outbox.flush_peer(peer)
        body = self._encoder.encode(message)
        if peer in self.sessions:
            self._send_in_session(peer, body)
            self.sessions.flush()
        elif (error := self._try_to_send(peer, body)) is not None:
            what = type(message).__name__
            raise Unreachable(f"{what} could not be sent to {peer}: {error}") from error

    def send_to_all(self, peers: Iterable[str], body: msgspec.Raw) -> list[str]:
        """Send to many peers without sessions; return those that are gone or take nothing."""
        return [peer for peer in peers if self._try_to_send(peer, bytes(body)) is not None]

    async def receive(self) -> tuple[str, In]:
        """Wait for the next message. Callers bound the wait with `asyncio.timeout`."""
        self._handshakes.start()
        while True:
            while self._ready:
                self._received += 1
                if self._received % _TURN == 0:
                    # Messages that are here already do not suspend the task. A caller whose time is
                    # up is cancelled here, so the message stays in the queue until after it.
                    await asyncio.sleep(0)
                peer, message = self._ready.popleft()
                if self.refusals.is_cut_off(peer):
                    self.refusals.drop(peer)
                    continue
                return peer, message
            await self._receive_frame()

    def put_back(self, messages: Sequence[tuple[str, In]]) -> None:
        """Return received messages for another reader: `receive` gives them again."""
        self._ready.extendleft(reversed(messages))

    async def attend(self) -> None:
        """Receive until cancelled, while no task calls `receive`, and acknowledge."""
        while True:
            await self._receive_frame()
            await asyncio.sleep(0)

    async def _receive_frame(self) -> None:
        parts = await self._socket.recv_multipart()
        peer = self._keys.name_in(parts[0])
        if peer is None:
            self.refusals.note("a peer", NO_PASS)
        elif self.refusals.is_cut_off(peer):
            self.refusals.drop(peer)
        else:
            try:
                relayed = self._is_relay(peer)
                body = join(parts[1:], max_bytes=self._max_bytes + relayed * EXTRA_BYTES)
                if relayed and is_bundle(body):
                    self._receive_bundle(peer, body)
                    return
                self._ready.extend((peer, message) for message in self._decoder.decode_all(body))
                return
            except FrameRefused as error:
                self.refusals.refuse(peer, error)
        self._refused += 1
        if self._refused % _TURN == 0:
            await asyncio.sleep(0)

    def _receive_bundle(self, relay: str, bundle: bytes) -> None:
        """Queue the messages in a relay's bundle. Raises FrameRefused if it is not a bundle."""
        for peer, body in self.sessions.take(relay, bundle, time.monotonic()):
            try:
                self._ready.extend((peer, message) for message in self._decoder.decode_all(body))
            except FrameRefused as error:
                self.refusals.refuse(peer, error)
        self.sessions.flush()
        self._look_after_sessions()

    def close(self) -> None:
        """Close the socket; queued messages are still sent for at most a second."""
        self._outbox.flush()
        self.sessions.flush()
        if self._timer is not None:
            self._timer.cancel()
        self._handshakes.close()
        self._socket.close()


class Line(Generic[In]):
    """The end that connects to one hub.

    An empty address is set by `move_to`. `keys` contain the name under which the hub knows this
    end. `refusals` never cut the hub off. At most `together_bytes` of messages travel together
    (`asyncrl.wire.transport.outbox`).
    """

    def __init__(
        self,
        address: str,
        keys: LineKeys,
        incoming: Any,
        refusals: Refusals | None = None,
        *,
        together_bytes: int = MAX_BYTES,
    ) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        identify(self._socket, keys)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LINE_BYTES)
        self._socket.set_hwm(_HIGH_WATER)
        if address:
            self._socket.connect(address)
        self.refusals = Refusals() if refusals is None else refusals
        self._decoder: FrameDecoder[In] = FrameDecoder(incoming, max_bytes=LINE_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._address = address
        self._ready: deque[In] = deque()
        self._outbox = Outbox(self._send_body, max_bytes=together_bytes)
        self._full: Unreachable | None = None

    def move_to(self, address: str) -> None:
        """Connect to the hub at another address. What is queued for the old one is dropped."""
        if address == self._address:
            return
        self._outbox.flush()
        if self._address:
            self._socket.disconnect(self._address)
        self._socket.connect(address)
        self._address = address

    def send_soon(self, message: msgspec.Struct, *, urgent: bool | None = None) -> None:  # noqa: ARG002
        """Queue a message; `urgent` is for relays. Raises Unreachable if the queue was full."""
        if self._full is not None:
            raise self._full
        self._outbox.add(self._address, message)

    def _send_body(self, _peer: str, body: bytes) -> None:
        error = error_of(self._socket.send_multipart(split(body), flags=zmq.NOBLOCK))
        if error is not None:
            self._full = Unreachable(f"messages could not be queued for {self._address}: {error}")

    async def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the hub. Raises Unreachable if the queue is full."""
        self._outbox.flush()
        try:
            await self._socket.send_multipart(split(self._encoder.encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unreachable(
                f"{type(message).__name__} could not be queued for {self._address}: "
                f"{error.strerror}"
            ) from error

    async def receive(self) -> In:
        """Wait for the next message. Callers bound the wait with `asyncio.timeout`."""
        while not self._ready:
            parts = await self._socket.recv_multipart()
            try:
                self._ready.extend(self._decoder.decode_all(join(parts, max_bytes=LINE_BYTES)))
            except FrameRefused as error:
                self.refusals.refuse(self._address, error)
                await asyncio.sleep(0)
        return self._ready.popleft()

    async def receive_within(self, seconds: float, *, what: str) -> In:
        """Wait for the next message, at most this long. Raises NoReply, which names `what`."""
        try:
            async with asyncio.timeout(seconds):
                return await self.receive()
        except TimeoutError as error:
            raise NoReply(
                f"waited {seconds:.0f} s for {what} at {self._address}, but nothing came"
            ) from error

    def close(self) -> None:
        """Close the socket; queued messages are still sent for at most a second."""
        self._outbox.flush()
        self._socket.close()
