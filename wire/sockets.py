"""Two kinds of socket: a `Hub` that many peers connect to, and a `Line` to one hub.

Both speak msgspec structs of one direction each. A message that does not decode is dropped, logged
and counted: a broken peer must not take the run down, and nothing but data can arrive.
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
"""Messages queued per peer before a send fails; the scheduler's bounds keep far below it."""


class Hub(Generic[In]):
    """The end that binds. Peers are known by the name under which they connect."""

    def __init__(self, address: str, incoming: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(_HIGH_WATER)
        self._socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self.undecodable = 0
        """Messages dropped because they did not decode."""

    async def send(self, peer: str, message: msgspec.Struct) -> None:
        """Send to one peer. Raises Unreachable when nobody is connected under that name."""
        try:
            await self._socket.send_multipart(
                [peer.encode(), self._encoder.encode(message)], flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            raise Unreachable(
                f"{type(message).__name__} could not be sent to {peer}: {error.strerror}"
            ) from error

    async def receive(self) -> tuple[str, In]:
        """Wait for the next message; callers bound the wait (`asyncio.timeout`)."""
        while True:
            peer, body = await self._socket.recv_multipart()
            try:
                return peer.decode(errors="replace"), self._decoder.decode(body)
            except msgspec.DecodeError as error:
                self.undecodable += 1
                logger.warning("dropped a message of %d bytes from %r: %s", len(body), peer, error)

    def close(self) -> None:
        """Close the socket after sending what is queued, for at most a second."""
        self._socket.close()


class Line(Generic[In]):
    """The end that connects to one hub, under a name."""

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
        """Queue a message for the hub. Raises Unreachable when the queue is full."""
        try:
            await self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unreachable(
                f"{type(message).__name__} could not be queued for {self._address}: "
                f"{error.strerror}"
            ) from error

    async def receive(self) -> In:
        """Wait for the next message; callers bound the wait (`asyncio.timeout`)."""
        while True:
            body = await self._socket.recv()
            try:
                return self._decoder.decode(body)
            except msgspec.DecodeError as error:
                logger.warning("dropped a message of %d bytes: %s", len(body), error)

    async def receive_within(self, seconds: float, *, what: str) -> In:
        """`receive`, but no longer than this. Raises NoReply naming what was waited for."""
        try:
            async with asyncio.timeout(seconds):
                return await self.receive()
        except TimeoutError as error:
            raise NoReply(
                f"waited {seconds:.0f} s for {what} at {self._address}; nothing came"
            ) from error

    def close(self) -> None:
        """Close the socket after sending what is queued, for at most a second."""
        self._socket.close()
