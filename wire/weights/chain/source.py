"""Serves the versions in the trainer's files to other nodes."""

import mmap
import os
from concurrent.futures import Future

import numpy as np

from asyncrl.wire.messages.chain import Ask
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.weights.chain.cached_version import Held
from asyncrl.wire.weights.chain.serving import State
from asyncrl.wire.weights.chain.thread import ServingThread
from asyncrl.wire.weights.chunks import CHUNK_BYTES, Grid, alike, name_of
from asyncrl.wire.weights.files import check_version, marked, open_published
from asyncrl.wire.weights.layout import WeightManifest

_FILES = 2
"""Number of versions that the trainer keeps."""


class PublishedVersions:
    """The versions of the source, which the trainer may overwrite at any time."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._held: dict[str, Held] = {}
        """The newest last."""
        self._past: dict[str, None] = {}

    def add(self, manifest: WeightManifest) -> None:
        """Serve a new version and the previous one. Raises WeightsReadError if it is not there."""
        grid = Grid(manifest.nbytes, self._chunk_bytes)
        descriptor = open_published(manifest)
        try:
            check_version(descriptor, manifest)
            memory = mmap.mmap(descriptor, manifest.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._held[name_of(manifest)] = Held(
            manifest,
            np.frombuffer(memory, np.uint8),
            lambda: marked(memory) == manifest.policy_version,
            grid,
        )
        while len(self._held) > _FILES:
            self._drop(next(iter(self._held)))

    def forget(self) -> None:
        """Drop all versions."""
        for name in list(self._held):
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._held[name]
        self._past[name] = None

    def state(self, version: str, index: int) -> State:
        """Return the state of a chunk."""
        held = self._held.get(version)
        if held is None:
            return State.GONE if version in self._past else State.COMING
        return State.HERE if index < held.grid.count and held.still() else State.GONE

    def to_send(self, ask: Ask) -> tuple[Held, Held | None]:
        """Return the version of a chunk that is here, and the base for it."""
        held = self._held[ask.version]
        base = self._held.get(ask.base) if ask.base is not None else None
        same = base is not None and alike(base.manifest, held.manifest) and base.still()
        return held, base if same else None


class WeightSource(ServingThread[PublishedVersions]):
    """A thread on the trainer's node, see `ServingThread`. The trainer never waits for it."""

    def __init__(
        self,
        name: str,
        address: str,
        keys: HubKeys | None,
        *,
        bytes_per_second: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__(name, address, keys, PublishedVersions(chunk_bytes), bytes_per_second)
        self._thread.start()

    def publish(self, manifest: WeightManifest) -> Future[None]:
        """Serve a new version and the previous one; the future may fail with WeightsReadError."""
        return self._call(lambda: self._versions.add(manifest))

    def forget(self) -> Future[None]:
        """Serve no version until another is published: the trainer is gone, free its memory."""
        return self._call(self._versions.forget)
