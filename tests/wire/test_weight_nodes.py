"""Weights between nodes over real sockets: bit for bit, or a named error, whatever a peer sends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from wire import RunKey
from wire.errors import (
    KeyUnusable,
    PublishError,
    WeightsNotReceivedError,
    WeightsReadError,
    WeightsSupersededError,
    WireError,
)
from wire.messages.chain import Ask, Chunk, Gone, Parent
from wire.sockets import identify
from wire.weights import delta
from wire.weights.chain.node import Received, WeightNode
from wire.weights.chain.published import PublishedVersions
from wire.weights.chain.receiving import Timing
from wire.weights.chain.serving import State
from wire.weights.chain.source import WeightSource
from wire.weights.chunks import Grid, checksum, name_of
from wire.weights.layout import WRITING, WeightManifest
from wire.weights.reader import WeightBuffer
from wire.weights.writer import WeightPublisher

KEY = RunKey.new()
CHUNK = 1 << 14
TIMING = Timing(silent_seconds=3, limit_seconds=20)
SECONDS = 30
LARGE = {"elements": 1_500_000}
"""3 MB: a node may send 1 MiB before it has to slow down."""


def weights(version: int, *, elements: int = 300_000) -> list[tuple[str, torch.Tensor]]:
    """Consecutive versions differ in one of 50 elements."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(elements, generator=generator).bfloat16()
    tensor.view(torch.int16)[version % 50 :: 50] ^= 1 + version % 2
    return [("big", tensor), ("small", torch.full((3,), float(version)))]


def same(manifest: WeightManifest, version: int, **size: int) -> bool:
    buffer = WeightBuffer()
    buffer.read(manifest)
    want = dict(weights(version, **size))
    return all(torch.equal(tensor, want[name]) for name, tensor in buffer.tensors())


class Cluster:
    """A trainer with its source, and nodes that are made by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.publisher = WeightPublisher(directory, "trainer", dtype=torch.bfloat16)
        self.source = WeightSource(
            "source", "tcp://127.0.0.1:0", KEY.hub("source"), chunk_bytes=CHUNK
        )
        self.nodes: dict[str, WeightNode] = {}

    def publish(self, version: int, **size: int) -> WeightManifest:
        manifest = self.publisher.publish(weights(version, **size), version)
        self.source.publish(manifest).result(SECONDS)
        return manifest

    def node(self, name: str, timing: Timing = TIMING, **options: float) -> WeightNode:
        self.nodes[name] = WeightNode(
            name,
            "tcp://127.0.0.1:0",
            KEY.hub(name),
            directory=self.directory,
            files_id=name,
            timing=timing,
            chunk_bytes=CHUNK,
            **options,
        )
        return self.nodes[name]

    def parent(self, child: str, name: str) -> Parent:
        address = self.source.address if name == "source" else self.nodes[name].address
        return Parent(name, address, KEY.line(name, child))

    def fetch(self, node: str, manifest: WeightManifest, *parents: str) -> Future[Received]:
        return self.nodes[node].fetch(manifest, [self.parent(node, name) for name in parents])

    def close(self) -> None:
        for one in (self.source, *self.nodes.values()):
            one.close()
        self.publisher.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    one = Cluster(tmp_path)
    yield one
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_chain_passes_versions_on_whole_and_then_as_deltas(cluster: Cluster) -> None:
    names = ["a", "b", "c"]
    for name in names:
        cluster.node(name)
    for version in range(4):
        manifest = cluster.publish(version)
        futures = [
            cluster.fetch(name, manifest, *reversed(["source", *names[:i]]))
            for i, name in enumerate(names)
        ]
        for future in futures:
            received = future.result(SECONDS)
            assert received.manifest.policy_version == version
            assert Path(received.manifest.path).parent == cluster.directory
            assert same(received.manifest, version)
            share = received.nbytes / manifest.nbytes
            assert share < 0.06 if version else 0.99 < share <= 1
    assert cluster.source.sent_bytes < 1.8 * manifest.nbytes


def test_the_version_before_can_be_read_until_the_one_after_the_next(cluster: Cluster) -> None:
    cluster.node("a")
    before = cluster.fetch("a", cluster.publish(0), "source").result(SECONDS)
    after = cluster.fetch("a", cluster.publish(1), "source").result(SECONDS)
    assert same(before.manifest, 0)
    assert same(after.manifest, 1)
    cluster.fetch("a", cluster.publish(2), "source").result(SECONDS)
    with pytest.raises(WeightsSupersededError, match="holds version 2"):
        same(before.manifest, 0)


def test_a_joiner_receives_from_a_node_and_not_from_the_source(cluster: Cluster) -> None:
    cluster.node("a")
    cluster.node("joiner")
    manifest = cluster.publish(0)
    cluster.fetch("a", manifest, "source").result(SECONDS)
    sent = cluster.source.sent_bytes
    assert same(cluster.fetch("joiner", manifest, "a", "source").result(SECONDS).manifest, 0)
    assert cluster.source.sent_bytes == sent
    again = cluster.fetch("joiner", manifest, "a").result(SECONDS)
    assert again.nbytes == 0


def test_children_of_a_closed_node_move_up(cluster: Cluster) -> None:
    cluster.node("a", bytes_per_second=100_000)
    cluster.node("b")
    manifest = cluster.publish(0, **LARGE)
    cluster.fetch("a", manifest, "source").result(SECONDS)
    future = cluster.fetch("b", manifest, "a", "source")
    cluster.nodes["a"].close()
    received = future.result(SECONDS)
    assert same(received.manifest, 0, **LARGE)
    assert "a" in received.left


def test_a_slow_parent_is_left(cluster: Cluster) -> None:
    """At its pace the version would take 40 s."""
    cluster.node("slow", bytes_per_second=60_000)
    cluster.node("b", Timing(probe_seconds=0.02, limit_seconds=SECONDS))
    manifest = cluster.publish(0, **LARGE)
    cluster.fetch("slow", manifest, "source").result(SECONDS)
    received = cluster.fetch("b", manifest, "slow", "source").result(SECONDS)
    assert same(received.manifest, 0, **LARGE)
    assert received.left == {"slow": "slower than source"}


def test_a_version_that_is_overwritten_on_the_way_is_given_up(cluster: Cluster) -> None:
    cluster.source.close()
    cluster.source = WeightSource(
        "source", "tcp://127.0.0.1:0", KEY.hub("source"), chunk_bytes=CHUNK, bytes_per_second=1e5
    )
    cluster.node("a")
    cluster.node("b")
    manifest = cluster.publish(0, **LARGE)
    futures = [
        cluster.fetch("a", manifest, "source"),
        cluster.fetch("b", manifest, "a", "source"),
    ]
    for version in (1, 2):  # the trainer waits for nobody
        cluster.publisher.publish(weights(version, **LARGE), version)
    for future in futures:
        with pytest.raises(WeightsSupersededError, match="version 0 did not arrive at"):
            future.result(SECONDS)


def test_a_newer_version_takes_the_place_of_one_on_its_way(cluster: Cluster) -> None:
    cluster.node("a")
    cluster.node("dead")
    parent = cluster.parent("a", "dead")
    cluster.nodes["dead"].close()
    old = cluster.nodes["a"].fetch(cluster.publish(0), [parent])
    new = cluster.fetch("a", cluster.publish(1), "source")
    with pytest.raises(WeightsSupersededError, match="was told to fetch version 1-"):
        old.result(SECONDS)
    assert same(new.result(SECONDS).manifest, 1)


def test_a_replaced_trainer_may_publish_a_version_again(cluster: Cluster) -> None:
    """Same policy version, other bytes: a node that holds the first takes the second."""
    cluster.node("a")
    cluster.fetch("a", cluster.publish(5), "source").result(SECONDS)
    with WeightPublisher(cluster.directory, "trainer.1", dtype=torch.bfloat16) as replaced:
        manifest = replaced.publish(weights(7), 5)
        cluster.source.publish(manifest).result(SECONDS)
        assert same(cluster.fetch("a", manifest, "source").result(SECONDS).manifest, 7)


def test_nobody_answers(cluster: Cluster) -> None:
    cluster.node("a", Timing(silent_seconds=0.2, limit_seconds=1))
    cluster.node("dead")
    parent = cluster.parent("a", "dead")
    cluster.nodes["dead"].close()
    with pytest.raises(WeightsNotReceivedError, match=r"not whole after 1 s .*dead: "):
        cluster.nodes["a"].fetch(cluster.publish(0), [parent]).result(SECONDS)


def test_a_node_that_closes_says_so(cluster: Cluster) -> None:
    cluster.node("a")
    manifest = msgspec.structs.replace(cluster.publish(0), path="another")  # unknown to the source
    future = cluster.fetch("a", manifest, "source")
    cluster.nodes["a"].close()
    with pytest.raises(WeightsNotReceivedError, match="a was closed"):
        future.result(SECONDS)
    with pytest.raises(WireError, match="no longer serves"):
        cluster.fetch("a", manifest, "source").result(SECONDS)


def test_no_memory(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.node("a")
    manifest = cluster.publish(0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PublishError, match="MiB free"):
        cluster.fetch("a", manifest, "source").result(SECONDS)


def test_a_source_refuses_what_is_not_published(cluster: Cluster) -> None:
    manifest = cluster.publish(0)
    for wrong, message in (
        (msgspec.structs.replace(manifest, policy_version=9), "holds version 0"),
        (msgspec.structs.replace(manifest, nbytes=64), "is not what the manifest"),
    ):
        with pytest.raises(WeightsReadError, match=message):
            cluster.source.publish(wrong).result(SECONDS)


@pytest.mark.parametrize(("overwritten", "sent"), [(1, "nothing"), (0, "the whole chunk")])
def test_what_is_overwritten_while_it_is_read_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwritten: int, sent: str
) -> None:
    versions = PublishedVersions(CHUNK)
    with WeightPublisher(tmp_path, "trainer", dtype=torch.bfloat16) as publisher:
        manifests = [publisher.publish(weights(version), version) for version in range(2)]
        for manifest in manifests:
            versions.add(manifest)
        ask = Ask(name_of(manifests[1]), 3, name_of(manifests[0]))
        held, base = versions.to_send(ask)
        assert held.encoded(3, base)[0].base == ask.base
        really = delta.encode

        def meanwhile(*arguments: Any) -> bytes | None:
            body = really(*arguments)
            with Path(manifests[overwritten].path).open("r+b") as file:
                file.write(WRITING.to_bytes(8, "little", signed=True))
            return body

        monkeypatch.setattr(delta, "encode", meanwhile)
        if sent == "nothing":
            with pytest.raises(WeightsSupersededError, match="overwritten"):
                held.encoded(3, base)
            assert versions.state(ask.version, 3) is State.GONE
        else:
            chunk, parts = held.encoded(3, base)
            assert chunk.base is None
            assert b"".join(parts) == held.chunk(3).tobytes()
            assert versions.to_send(ask)[1] is None


def test_other_machines_need_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyUnusable, match=r"tcp://0\.0\.0\.0:0 can be reached"):
        WeightSource("source", "tcp://0.0.0.0:0", None)
    node = WeightNode("a", "tcp://127.0.0.1:0", None, directory=tmp_path, files_id="a")
    with pytest.raises(zmq.ZMQError, match="in use"):
        WeightSource("source", node.address, None)
    manifest = WeightManifest(0, "nowhere", 128, ())
    with pytest.raises(KeyUnusable, match=r"tcp://10\.0\.0\.1:1 can be reached"):
        node.fetch(manifest, [Parent("b", "tcp://10.0.0.1:1", None)]).result(SECONDS)
    node.close()


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


def test_chunks_cover_a_file_once() -> None:
    grid = Grid(64 + 3 * 128 + 64, 128)
    covered = [place for i in range(grid.count) for place in range(grid.span(i).stop)[grid.span(i)]]
    assert covered == list(range(64, grid.nbytes))
    assert Grid(64, 128).count == 0
    assert checksum([b"ab", b"c"]) == checksum([b"abc"])
    for nbytes in (0, 65):
        with pytest.raises(WeightsReadError, match="multiples of 64"):
            Grid(nbytes, 128)
