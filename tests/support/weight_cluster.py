"""A trainer that publishes small weights, its source, and nodes, on loopback TCP with keys."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch

from asyncrl.wire import RunKey
from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.weights.chain.node import Received, WeightNode
from asyncrl.wire.weights.chain.receiving import Timing
from asyncrl.wire.weights.chain.source import WeightSource
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer
from asyncrl.wire.weights.writer import WeightPublisher

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
