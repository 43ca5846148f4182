"""Sockets that send any bytes, and the bytes of `benchmarks.hostile`."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from deliveries_of import delivery_of

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.sockets import identify
from asyncrl.wire.transport.keys import LineKeys, RunKey
from benchmarks.hostile.frames import CORPUS as CORPUS
from benchmarks.hostile.frames import DEEP as DEEP


def attack_without_a_key(folder: Path) -> None:
    """Open the sockets in a run's folder in every way, and send forged samples and nonsense."""
    forged = [delivery_of(SampleId(group, 0)) for group in range(32)]
    bodies = [msgspec.msgpack.encode(delivery) for delivery in forged] + list(CORPUS.values())
    context, peers = zmq.Context(), []
    for name in ("control", "data", "user"):
        for keys in (None, RunKey.new().line(name, "generator-0")):
            peers.append(peer := context.socket(zmq.DEALER))
            peer.setsockopt(zmq.IDENTITY, b"generator-0")
            peer.setsockopt(zmq.SNDTIMEO, 1000)
            if keys is not None:
                peer.curve_serverkey = keys.hub
                peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
            peer.connect(f"ipc://{folder / name}")
            for body in bodies:
                peer.send(body)
        for body in bodies:
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
                raw.connect(str(folder / name))
                raw.sendall(body)
    time.sleep(0.5)  # long enough for many attempts to connect; nothing is waited for
    for peer in peers:
        peer.close(linger=0)
    context.term()


@contextlib.contextmanager
def raw_peer(address: str, keys: LineKeys) -> Iterator[zmq.asyncio.Socket]:
    """A socket that connects to a hub with these keys and sends any parts."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    identify(socket, keys)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
