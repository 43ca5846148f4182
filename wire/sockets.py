"""Two kinds of socket: a `Hub` that many peers connect to, and a `Line` to one hub.

Each end sends and receives msgspec structs of one direction. A message that does not decode is
dropped and logged, so a broken peer cannot end the run.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from wire.errors import NoReply, Unreachable

logger = logging.getLogger(__name__)

In = TypeVar("In")

_HIGH_WATER = 100_000
"""Messages queued per peer before a send fails. The scheduler's bounds stay far below it."""


class Hub(Generic[In]):
    """The end that binds. Peers are known by the name with which they connect.

    Args:
        address: a ZeroMQ address.
        incoming: union of the message types that peers may send.
    """

    def __init__(self, address: str, incoming: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(_HIGH_WATER)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    async def send(self, peer: str, message: msgspec.Struct) -> None:
        """Send to one peer.

        Raises:
            Unreachable: no peer of that name is connected.
        """
        try:
            await self._socket.send_multipart(
                [peer.encode(), self._encoder.encode(message)], flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            raise Unreachable(
                f"{type(message).__name__} could not be sent to {peer}: {error.strerror}"
            ) from error

    async def receive(self) -> tuple[str, In]:
        """Wait for the next message. Callers bound the wait with `asyncio.timeout`."""
        while True:
            peer, body = await self._socket.recv_multipart()
            try:
                return peer.decode(errors="replace"), self._decoder.decode(body)
            except msgspec.DecodeError as error:
                logger.warning("dropped a message of %d bytes from %r: %s", len(body), peer, error)

    def close(self) -> None:
        """Close the socket; queued messages are still sent for at most a second."""
        self._socket.close()


class Line(Generic[In]):
    """The end that connects to one hub.

    Args:
        address: the hub's ZeroMQ address.
        name: the name under which the hub knows this end.
        incoming: union of the message types that the hub may send.
    """

    def __init__(self, address: str, name: str, incoming: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(_HIGH_WATER)
        self._socket.connect(address)
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._address = address

    async def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the hub.

        Raises:
            Unreachable: the queue is full.
        """
        try:
            await self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unreachable(
                f"{type(message).__name__} could not be queued for {self._address}: "
                f"{error.strerror}"
            ) from error

    async def receive(self) -> In:
        """Wait for the next message. Callers bound the wait with `asyncio.timeout`."""
        while True:
            body = await self._socket.recv()
            try:
                return self._decoder.decode(body)
            except msgspec.DecodeError as error:
                logger.warning("dropped a message of %d bytes: %s", len(body), error)

    async def receive_within(self, seconds: float, *, what: str) -> In:
        """Wait for the next message, at most this long.

        Raises:
            NoReply: nothing came; the message names what was waited for.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self.receive()
        except TimeoutError as error:
            raise NoReply(
                f"waited {seconds:.0f} s for {what} at {self._address}, but nothing came"
            ) from error

    def close(self) -> None:
        """Close the socket; queued messages are still sent for at most a second."""
        self._socket.close()
