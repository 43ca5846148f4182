"""Weights between nodes over real sockets: bit for bit, or a named error, whatever a peer sends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from weight_cluster import CHUNK, KEY, LARGE, SECONDS, Cluster, same, weights

from asyncrl.wire.errors import (
    KeyUnusable,
    PublishError,
    WeightsNotReceivedError,
    WeightsReadError,
    WeightsSupersededError,
    WireError,
)
from asyncrl.wire.messages.chain import Ask, Parent
from asyncrl.wire.weights import delta
from asyncrl.wire.weights.chain.node import WeightNode
from asyncrl.wire.weights.chain.receiving import Timing
from asyncrl.wire.weights.chain.serving import State
from asyncrl.wire.weights.chain.source import PublishedVersions, WeightSource
from asyncrl.wire.weights.chunks import Grid, checksum, name_of
from asyncrl.wire.weights.layout import WRITING, WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher


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
    manifest = cluster.publish(4)
    whole = cluster.nodes["a"].fetch(manifest, [cluster.parent("a", "source")], deltas=False)
    assert whole.result(SECONDS).nbytes > 0.99 * manifest.nbytes


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
    with pytest.raises(WeightsSupersededError, match="fetches version 1-"):
        old.result(SECONDS)
    assert same(new.result(SECONDS).manifest, 1)


def test_a_replaced_trainer_may_publish_a_version_again(cluster: Cluster) -> None:
    """Same policy version, other bytes: a node that holds the first takes the second.

    Its header says the same, so it lies in another file: a late reader of the first never reads it.
    """
    cluster.node("a")
    first = cluster.fetch("a", cluster.publish(5), "source").result(SECONDS)
    last = cluster.fetch("a", cluster.publish(6), "source").result(SECONDS)
    with WeightPublisher(cluster.directory, "trainer.1", dtype=torch.bfloat16) as replaced:
        cluster.source.forget().result(SECONDS)
        manifest = replaced.publish(weights(7), 5)
        cluster.source.publish(manifest).result(SECONDS)
        assert same(cluster.fetch("a", manifest, "source").result(SECONDS).manifest, 7)
        assert same(last.manifest, 6), "the newest of the lost trainer, for who is reading it"
        with pytest.raises(WeightsSupersededError, match="were removed"):
            same(first.manifest, 7)
        manifest = replaced.publish(weights(8), 6)
        cluster.source.publish(manifest).result(SECONDS)
        assert same(cluster.fetch("a", manifest, "source").result(SECONDS).manifest, 8)
        assert len(list(cluster.directory.glob("asyncrl-a-weights-*"))) == 2


def test_a_version_that_the_source_has_forgotten_is_gone(cluster: Cluster) -> None:
    cluster.node("a")
    manifest = cluster.publish(0)
    cluster.source.forget().result(SECONDS)
    with pytest.raises(WeightsSupersededError, match="no parent has it any longer"):
        cluster.fetch("a", manifest, "source").result(SECONDS)


def test_the_same_version_from_other_parents_begins_anew(cluster: Cluster) -> None:
    """The source was replaced while its children waited for it."""
    cluster.node("a")
    cluster.node("dead")
    parent = cluster.parent("a", "dead")
    cluster.nodes["dead"].close()
    manifest = cluster.publish(0)
    old = cluster.nodes["a"].fetch(manifest, [parent])
    joined = cluster.nodes["a"].fetch(manifest, [parent])
    new = cluster.fetch("a", manifest, "source")
    assert same(new.result(SECONDS).manifest, 0)
    for one in (old, joined):
        with pytest.raises(WeightsSupersededError, match="fetches version"):
            one.result(SECONDS)


def test_nobody_answers(cluster: Cluster) -> None:
    cluster.node("a", Timing(silent_seconds=0.2, limit_seconds=1))
    cluster.node("dead")
    parent = cluster.parent("a", "dead")
    cluster.nodes["dead"].close()
    with pytest.raises(WeightsNotReceivedError, match=r"incomplete after 1 s .*dead: "):
        cluster.nodes["a"].fetch(cluster.publish(0), [parent]).result(SECONDS)
    cluster.node("b", Timing(silent_seconds=0.2, stall_seconds=1))
    with pytest.raises(WeightsNotReceivedError, match=r"no chunk came for 1 s .*dead: "):
        cluster.nodes["b"].fetch(cluster.publish(1), [parent]).result(SECONDS)


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


def test_chunks_cover_a_file_once() -> None:
    grid = Grid(64 + 3 * 128 + 64, 128)
    covered = [place for i in range(grid.count) for place in range(grid.span(i).stop)[grid.span(i)]]
    assert covered == list(range(64, grid.nbytes))
    assert Grid(64, 128).count == 0
    assert checksum([b"ab", b"c"]) == checksum([b"abc"])
    for nbytes in (0, 65):
        with pytest.raises(WeightsReadError, match="multiples of 64"):
            Grid(nbytes, 128)
