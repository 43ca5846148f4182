"""Notices connections that do not prove that they may speak to a hub."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.refusals import Refusals

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ERROR = FrameRefused(
    Reason.UNAUTHENTICATED, "its handshake failed: it does not have the run's key, or is no peer"
)


class HandshakeWatch:
    """Counts the failed handshakes of a socket, in a task that `start` begins.

    Args:
        socket: not bound yet.
        refusals: are told of each failed handshake.
    """

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
