"""Nodes among peers that hold keys of the run and send anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from weight_cluster import CHUNK, KEY, SECONDS, Cluster, same

from asyncrl.wire.messages.chain import Ask, Chunk, Gone, Parent
from asyncrl.wire.sockets import identify
from asyncrl.wire.weights.chain.node import Received
from asyncrl.wire.weights.chain.receiving import Timing
from asyncrl.wire.weights.chunks import name_of


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    one = Cluster(tmp_path)
    yield one
    one.close()
    assert list(tmp_path.iterdir()) == []


class FakeParent:
    """A parent with the right keys that answers each ask with what it is told to send."""

    def __init__(self, answer: Callable[[Ask], list[list[bytes]]]) -> None:
        self.answer = answer
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.curve_server, self.socket.curve_secretkey = True, KEY.hub("fake").secret
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.parent = Parent("fake", f"tcp://127.0.0.1:{port}", KEY.line("fake", "a"))

    def serve(self, until: Future[Received]) -> None:
        deadline = time.monotonic() + SECONDS
        while not until.done():
            assert time.monotonic() < deadline
            if self.socket.poll(20):
                child, body = self.socket.recv_multipart()
                for parts in self.answer(msgspec.msgpack.decode(body, type=Ask)):
                    self.socket.send_multipart([child, *parts])

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


def nonsense(ask: Ask) -> list[list[bytes]]:
    encode, bits = msgspec.msgpack.encode, np.random.default_rng(ask.index)
    return [
        [bits.bytes(50)],
        [b"", b""],
        [b"\xff"] * 900,
        [encode({"type": "chunk", "version": ask.version, "index": -1, "checksum": 0})],
        [encode(Gone("another version", "x" * 4000))],
        [encode(Chunk(ask.version, 10**9, 0)), bits.bytes(CHUNK)],
        [encode(Chunk(ask.version, ask.index, 1, "an unknown base")), bits.bytes(40)],
        [encode(Chunk(ask.version, ask.index, 1, ask.base)), b"\2" + bits.bytes(90)],
        [encode(Chunk(ask.version, ask.index, 1)), bits.bytes(CHUNK)],
        [encode(Chunk(ask.version, ask.index, 1)), bits.bytes(CHUNK - 1)],
        [encode(Chunk(ask.version, ask.index, 1))],
    ]


def test_whatever_a_parent_sends_the_next_one_is_asked(cluster: Cluster) -> None:
    cluster.node("a")
    cluster.fetch("a", cluster.publish(0), "source").result(SECONDS)
    fake = FakeParent(nonsense)
    future = cluster.nodes["a"].fetch(
        cluster.publish(1), [fake.parent, cluster.parent("a", "source")]
    )
    fake.serve(future)
    received = future.result(SECONDS)
    fake.close()
    assert same(received.manifest, 1)
    assert "damaged" in received.left["fake"]


def test_a_message_that_is_too_long_closes_its_connection_only(cluster: Cluster) -> None:
    cluster.node("a", Timing(silent_seconds=0.3, limit_seconds=20))
    fake = FakeParent(lambda _ask: [[bytes(1 << 20)]])
    future = cluster.nodes["a"].fetch(
        cluster.publish(0), [fake.parent, cluster.parent("a", "source")]
    )
    fake.serve(future)
    assert same(future.result(SECONDS).manifest, 0)
    fake.close()


def test_whatever_a_child_sends_others_are_served(cluster: Cluster) -> None:
    cluster.node("a")
    manifest = cluster.publish(0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    child = context.socket(zmq.DEALER)
    identify(child, KEY.line("source", "hostile"))
    child.connect(cluster.source.address)
    encode, name = msgspec.msgpack.encode, name_of(manifest)
    for body in (b"", b"\xff", b"x" * 4000, encode(Ask("1-2", 5)), encode(Ask(name, 10**12))):
        child.send(body)
    child.send_multipart([b"a", b"b", b"c"])
    for index in range(500):  # more than a child may have outstanding
        child.send(encode(Ask("a version to come", index)))
    stranger = context.socket(zmq.DEALER)  # has the hub's key, but no pass of that name
    stranger.curve_serverkey = KEY.hub("source").public
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.identity = b"a" + bytes(16)
    stranger.connect(cluster.source.address)
    stranger.send(encode(Ask(name, 0)))
    assert same(cluster.fetch("a", manifest, "source").result(SECONDS).manifest, 0)
    for socket in (child, stranger):
        socket.close(linger=0)
    context.term()
