"""Nodes of a chain and receivers of broadcasts, each in a process of its own, on loopback TCP.

python -m benchmarks.weights_nodes      a node, told by lines of JSON what to be and to do
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import torch

from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.transport.keys import HubKeys, RunKey
from asyncrl.wire.weights.chain.node import WeightNode
from asyncrl.wire.weights.chain.receiving import Timing
from asyncrl.wire.weights.chain.source import WeightSource
from asyncrl.wire.weights.layout import SHARED_MEMORY, WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer

_LIMIT_SECONDS = 150.0
_ANY = "tcp://127.0.0.1:0"


class Link(msgspec.Struct, frozen=True):
    encrypted: bool = True
    bytes_per_second: float | None = None
    """That a node may send; None: as fast as it can."""


class Role(msgspec.Struct):
    name: str
    """`source`, `reader` (into memory of its own), or that of a node."""
    keys: HubKeys | None = None
    folder: str = ""
    link: Link = Link()


class Fetch(msgspec.Struct):
    """A version to bring, or for the source to serve."""

    manifest: WeightManifest
    parents: list[Parent] = []
    deltas: bool = False


class Answer(msgspec.Struct):
    """Of a process that has done what it was told."""

    address: str = ""
    nbytes: int = 0
    left: dict[str, str] = {}


def _serve(lines: IO[bytes], answers: IO[bytes]) -> None:
    """A node's process: its role first, then versions, until the lines end."""

    def answer(one: Answer) -> None:
        answers.write(msgspec.json.encode(one) + b"\n")
        answers.flush()

    role = msgspec.json.decode(lines.readline(), type=Role)
    if role.name == "reader":
        torch.set_num_threads(1)
        buffer = WeightBuffer()
        answer(Answer())
        for line in lines:
            buffer.read(msgspec.json.decode(line, type=Fetch).manifest)
            answer(Answer())
        return
    pace = role.link.bytes_per_second
    node: WeightSource | WeightNode
    if role.name == "source":
        node = WeightSource(role.name, _ANY, role.keys, bytes_per_second=pace)
    else:
        node = WeightNode(
            role.name,
            _ANY,
            role.keys,
            directory=Path(role.folder),
            files_id=role.name,
            timing=Timing(limit_seconds=_LIMIT_SECONDS),
            bytes_per_second=pace,
        )
    answer(Answer(address=node.address))
    for line in lines:
        order = msgspec.json.decode(line, type=Fetch)
        if isinstance(node, WeightSource):
            node.publish(order.manifest).result(_LIMIT_SECONDS)
            answer(Answer())
        else:
            done = node.fetch(order.manifest, order.parents, deltas=order.deltas).result()
            answer(Answer(nbytes=done.nbytes, left=done.left))
    node.close()


class Child:
    """A process that does what it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights_nodes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    def tell(self, message: msgspec.Struct) -> None:
        self._orders.write(msgspec.json.encode(message) + b"\n")
        self._orders.flush()

    def answer(self) -> Answer:
        """A process that says nothing in time is killed, which ends the wait for its line."""
        late = threading.Timer(_LIMIT_SECONDS, self._process.kill)
        late.start()
        line = self._answers.readline()
        late.cancel()
        if not line:
            raise RuntimeError(f"a process ended, or did not answer in {_LIMIT_SECONDS:g} s")
        return msgspec.json.decode(line, type=Answer)

    def close(self) -> None:
        self._orders.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


class Nodes:
    """A source and a chain of receivers."""

    def __init__(self, count: int, link: Link, folder: str) -> None:
        key = RunKey.new() if link.encrypted else None
        self._names = ["source", *(f"node-{i}" for i in range(count))]
        self._children = [Child() for _ in self._names]
        for child, name in zip(self._children, self._names, strict=True):
            child.tell(Role(name, None if key is None else key.hub(name), folder, link))
        addresses = [child.answer().address for child in self._children]
        self._parents = [
            [
                Parent(
                    self._names[above],
                    addresses[above],
                    None if key is None else key.line(self._names[above], name),
                )
                for above in range(i - 1, -1, -1)
            ]
            for i, name in enumerate(self._names)
        ]

    def distribute(
        self, manifest: WeightManifest, count: int, *, deltas: bool = False
    ) -> tuple[float, list[Answer]]:
        """Seconds until the first `count` receivers have a version, and what each says."""
        source, *receivers = self._children[: count + 1]
        source.tell(Fetch(manifest, deltas=deltas))
        source.answer()
        began = time.perf_counter()
        for child, parents in zip(receivers, self._parents[1:], strict=False):
            child.tell(Fetch(manifest, parents, deltas))
        answers = [child.answer() for child in receivers]
        return time.perf_counter() - began, answers

    def close(self) -> None:
        for child in self._children:
            child.close()


@contextmanager
def nodes(count: int, link: Link) -> Iterator[Nodes]:
    """A source and `count` receivers inside the block."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        chain = Nodes(count, link, folder)
        try:
            yield chain
        finally:
            chain.close()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
