"""Sockets that send any bytes, and the bytes of `benchmarks.hostile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq
import zmq.asyncio

from benchmarks.hostile.frames import CORPUS as CORPUS
from benchmarks.hostile.frames import DEEP as DEEP
from wire.keys import LineKeys


@contextlib.contextmanager
def raw_peer(address: str, keys: LineKeys) -> Iterator[zmq.asyncio.Socket]:
    """A socket that connects to a hub with these keys and sends any parts."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, keys.identity)
    socket.curve_serverkey = keys.hub
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
