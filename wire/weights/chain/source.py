"""Serves the versions in the trainer's files to other nodes."""

from __future__ import annotations

from concurrent.futures import Future

from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.weights.chain.published import PublishedVersions
from asyncrl.wire.weights.chain.thread import ServingThread
from asyncrl.wire.weights.chunks import CHUNK_BYTES
from asyncrl.wire.weights.layout import WeightManifest


class WeightSource(ServingThread[PublishedVersions]):
    """A thread on the trainer's node. The trainer never waits for it.

    Args:
        name: of this node.
        address: to bind; port 0 of TCP: any that is free.
        keys: of this node's hub; None: only for children on this machine.
        bytes_per_second: that it may send; None: no limit.
        chunk_bytes: of every node of the chain.
    """

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
        self._start()

    def publish(self, manifest: WeightManifest) -> Future[None]:
        """Serve a version that the trainer has published, and the one before it.

        The future fails with WeightsReadError if the file does not hold this version.
        """
        return self._call(lambda: self._versions.add(manifest))

    def forget(self) -> Future[None]:
        """Serve no version until another is published: the trainer is gone, free its memory."""
        return self._call(self._versions.forget)
