"""ZeroMQ sockets for chunks. Used by one thread each, without an event loop.

Every connection is encrypted and authenticated by the run's keys (`wire.transport.keys`). Without
keys a socket stays on this machine.
"""

from typing import Any

import msgspec
import zmq

from asyncrl.wire.errors import KeyUnusable
from asyncrl.wire.messages.chain import FromParent, Parent, ToParent
from asyncrl.wire.sockets import identify
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.outbox import PART_BYTES
from asyncrl.wire.transport.refusals import NO_PASS, Refusals
from asyncrl.wire.weights.chain.cached_version import Part
from asyncrl.wire.weights.chain.serving import MAX_ASKS

MESSAGE_BYTES = 4096
"""Longest message, without the chunk's bytes."""
_LOCAL = ("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")
_QUEUED = 2 * MAX_ASKS
_SPARE = 4
"""Parts that a chunk's frame may have beyond those of a chunk."""

Socket = zmq.Socket[Any]


def check_address(address: str, keys: object) -> None:
    """Raise KeyUnusable for an address that other machines reach, unless there are keys."""
    if keys is None and not address.startswith(_LOCAL):
        raise KeyUnusable(
            f"{address} can be reached from other machines, so it needs the run's keys; only ipc "
            "and loopback addresses need none"
        )


class ParentSocket:
    """The end that children connect to, with the keys of this node's hub.

    Port 0 of TCP is any free one. Keys None: for this machine only. Raises KeyUnusable if the
    address needs keys, zmq.ZMQError if it cannot be bound.
    """

    def __init__(
        self, context: zmq.Context[Socket], address: str, keys: HubKeys | None, refusals: Refusals
    ) -> None:
        check_address(address, keys)
        self.socket: Socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self.socket.set_hwm(_QUEUED)
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_secretkey = keys.secret
        self._keys = keys
        self._refusals = refusals
        self._decoder: FrameDecoder[ToParent] = FrameDecoder(ToParent, max_bytes=MESSAGE_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self.socket.bind(address)
        except zmq.ZMQError:
            self.socket.close()
            raise
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        self.address = endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else address

    def receive(self) -> tuple[str, ToParent] | None:
        """Return the next accepted message and its sender; None: refused. Raises zmq.Again."""
        parts = self.socket.recv_multipart(zmq.NOBLOCK)
        child = self._name_in(parts[0])
        if child is None:
            self._refusals.note("a child", NO_PASS)
        elif self._refusals.is_cut_off(child):
            self._refusals.drop(child)
        else:
            try:
                if len(parts) != 2:
                    raise FrameRefused(Reason.PARTS, f"{len(parts) - 1} parts instead of 1")
                return child, self._decoder.decode(parts[1])
            except FrameRefused as error:
                self._refusals.refuse(child, error)
        return None

    def send(self, child: str, message: FromParent, parts: list[Part]) -> bool:
        """Queue a message and the bytes that follow it; False if the child cannot be reached."""
        name = child.encode() if self._keys is None else self._keys.identity_of(child)
        try:
            self.socket.send_multipart([name, self._encoder.encode(message), *parts], zmq.NOBLOCK)
        except zmq.ZMQError:  # not connected, or its queue is full
            return False
        return True

    def _name_in(self, identity: bytes) -> str | None:
        if self._keys is not None:
            return self._keys.name_in(identity)
        try:
            return identity.decode()
        except UnicodeDecodeError:
            return None


class ChildSocket:
    """The end that asks one parent; `name` is used without keys. Raises KeyUnusable."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        name: str,
        parent: Parent,
        refusals: Refusals,
        chunk_bytes: int,
    ) -> None:
        check_address(parent.address, parent.keys)
        self.parent = parent.name
        self.socket: Socket = context.socket(zmq.DEALER)
        if parent.keys is not None:
            identify(self.socket, parent.keys)
        else:
            self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + MESSAGE_BYTES)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.set_hwm(_QUEUED)
        self._refusals = refusals
        self._most_parts = chunk_bytes // PART_BYTES + _SPARE
        self._decoder: FrameDecoder[FromParent] = FrameDecoder(FromParent, max_bytes=MESSAGE_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self.socket.connect(parent.address)

    def receive(self) -> tuple[FromParent, list[Part]] | None:
        """Return the next accepted message and its bytes; None: refused. Raises zmq.Again."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            if len(frames) > self._most_parts:
                raise FrameRefused(Reason.PARTS, f"{len(frames)} parts are not a chunk")
            return self._decoder.decode(frames[0].bytes), [frame.buffer for frame in frames[1:]]
        except FrameRefused as error:
            self._refusals.refuse(self.parent, error)
            return None

    def send(self, message: ToParent) -> bool:
        """Queue a message; False if the parent's queue is full."""
        try:
            self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
