"""A trainer that broadcasts small weights on loopback, for members in threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.wire.weights.broadcast.groups import Limits
from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Outcome, WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer
from asyncrl.wire.weights.writer import WeightPublisher

CHUNK = 1 << 16
SECONDS = 60
LIMITS = Limits(window=20.0)
"""A loaded machine may take long until all are there."""


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """2 MB; tensors end within chunks, and chunks within tensors."""
    generator = torch.Generator().manual_seed(version)
    return [
        ("big", torch.randn(700, 701, generator=generator)),
        ("empty", torch.empty(0, 4)),
        ("half", torch.randn(33, generator=generator).bfloat16()),
        ("number", torch.tensor(version)),
    ]


class Trainer:
    """Publishes and broadcasts. `outcomes` are of its broadcasts."""

    def __init__(self, folder: Path, *, members: int, limits: Limits = LIMITS) -> None:
        self.outcomes: list[Outcome] = []
        self.publisher = WeightPublisher(folder, "trainer")
        self.sender = WeightSender(
            "127.0.0.1",
            members=members,
            limits=limits,
            note=self.outcomes.append,
            chunk_bytes=CHUNK,
        )

    def publish(self, version: int, *, readable: bool = True) -> WeightManifest:
        """The manifest; if it is not readable, it names no file, so only a broadcast helps."""
        tensors = weights(version)
        manifest = self.publisher.publish(tensors, version, fingerprint(tensors))
        manifest = self.sender.publish(manifest)
        return manifest if readable else msgspec.structs.replace(manifest, path="/nowhere")

    def outcomes_are(self, *expected: Outcome) -> bool:
        """Once the thread has noted as many; a member may return a little earlier."""
        deadline = time.monotonic() + SECONDS
        while len(self.outcomes) < len(expected) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.outcomes == list(expected)

    def close(self) -> None:
        self.sender.close()
        self.publisher.close()


def trainer(closing: ExitStack, folder: Path, **options: Any) -> Trainer:
    made = Trainer(folder, **options)
    closing.callback(made.close)
    return made


def holds(buffer: WeightBuffer, version: int) -> bool:
    want = dict(weights(version))
    return all(torch.equal(tensor, want[name]) for name, tensor in buffer.tensors())


def read_all(
    pool: ThreadPoolExecutor, buffers: list[WeightBuffer], manifest: WeightManifest
) -> list[BaseException | None]:
    """What each raises."""
    begun = [pool.submit(buffer.read, manifest) for buffer in buffers]
    return [one.exception(SECONDS) for one in begun]
