"""A child's line to the controller through the relay of its node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, TypeVar

import msgspec
import zmq

from asyncrl.wire.sessions.end import SessionEnd
from asyncrl.wire.sessions.peers import EXTRA_BYTES
from asyncrl.wire.sockets import LINE_BYTES, Line, error_of
from asyncrl.wire.transport.decoding import FrameRefused
from asyncrl.wire.transport.keys import LineKeys
from asyncrl.wire.transport.outbox import join, split
from asyncrl.wire.transport.refusals import Refusals

In = TypeVar("In")

_LAST_SECONDS = 1.0
"""Longest wait at the end for the controller to have everything."""
_ASK_SECONDS = 0.2


class SessionLine(Line[In]):
    """A `Line` that neither loses nor doubles messages while relays come and go."""

    def __init__(
        self, address: str, keys: LineKeys, incoming: Any, refusals: Refusals | None = None
    ) -> None:
        super().__init__(address, keys, incoming, refusals)
        self.session: SessionEnd[In] = SessionEnd(
            incoming, max_bytes=LINE_BYTES, transmit=self._transmit
        )

    def _transmit(self, frame: bytes) -> None:
        """Pass a frame to the relay. One that its queue does not take is sent again later."""
        error_of(self._socket.send_multipart(split(frame), flags=zmq.NOBLOCK))

    def send_soon(self, message: msgspec.Struct, *, urgent: bool | None = None) -> None:
        """See `Line.send_soon`; `urgent` as in `SessionEnd.send_soon`."""
        self.session.send_soon(message, urgent=urgent)

    async def send(self, message: msgspec.Struct) -> None:
        """See `Line.send`."""
        self.session.send(message)

    async def receive(self) -> In:
        """See `Line.receive`."""
        while not self._ready:
            self._accept(await self._socket.recv_multipart())
            if not self._ready:
                await asyncio.sleep(0)
        return self._ready.popleft()

    def _accept(self, parts: list[bytes]) -> None:
        try:
            self._ready.extend(
                self.session.arrived(join(parts, max_bytes=LINE_BYTES + EXTRA_BYTES))
            )
        except FrameRefused as error:
            self.refusals.refuse(self._address, error)

    def close(self) -> None:
        """Close the socket once the controller has everything, after a second at most."""
        self.session.close()
        ends = time.monotonic() + _LAST_SECONDS
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        while self.session.unacknowledged and time.monotonic() < ends:
            self.session.ask()
            with contextlib.suppress(zmq.ZMQError):
                if socket.poll(int(1000 * _ASK_SECONDS)):
                    self._accept(socket.recv_multipart(zmq.NOBLOCK))
        self.session.close()
        self._socket.close()
