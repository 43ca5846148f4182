"""A version in the memory of a node, and the chunks that are sent of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.wire.errors import WeightsSupersededError
from asyncrl.wire.messages.chain import Chunk
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.outbox import PART_BYTES, split
from asyncrl.wire.weights import delta
from asyncrl.wire.weights.chunks import Grid, checksum, name_of, word_bytes
from asyncrl.wire.weights.layout import WeightManifest

Part = bytes | memoryview


@dataclass(slots=True)
class Held:
    """A version, complete or arriving."""

    manifest: WeightManifest
    memory: NDArray[np.uint8]
    """`[nbytes]` of the file."""
    still: Callable[[], bool]
    """Returns True while the memory holds this version."""
    grid: Grid
    missing: set[int] = field(default_factory=set)
    checksums: dict[int, int] = field(default_factory=dict)
    name: str = field(init=False)
    word_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.name = name_of(self.manifest)
        self.word_bytes = word_bytes(self.manifest.tensors)

    def chunk(self, index: int) -> NDArray[np.uint8]:
        """Return the memory of a chunk."""
        return self.memory[self.grid.span(index)]

    def encoded(
        self, index: int, base: Held | None, *, more: bool = False
    ) -> tuple[Chunk, list[Part]]:
        """Return the message and bytes of a chunk, or its delta. Raises WeightsSupersededError."""
        body, used = None, None
        if base is not None and not base.missing:
            body = delta.encode(self.chunk(index), base.chunk(index), self.word_bytes)
            used = base.name if body is not None and base.still() else None
        if body is None or used is None:
            body = self.chunk(index).tobytes()
        if index not in self.checksums:
            self.checksums[index] = checksum([self.chunk(index).data])
        if not self.still():
            self.checksums.pop(index)
            raise WeightsSupersededError(f"version {self.name} is being overwritten")
        return Chunk(self.name, index, self.checksums[index], used, more), split(body)

    def receive(self, chunk: Chunk, parts: Sequence[Part], base: Held | None) -> None:
        """Put a chunk in its place, or raise FrameRefused: the place holds nothing."""
        place = self.chunk(chunk.index)
        size = sum(map(len, parts))
        if chunk.base is None:
            if size != len(place) or any(len(part) > PART_BYTES for part in parts):
                raise FrameRefused(
                    Reason.PARTS, f"{len(parts)} parts are not a chunk of {len(place)} bytes"
                )
            start = 0
            for part in parts:
                place[start : start + len(part)] = np.frombuffer(part, np.uint8)
                start += len(part)
        elif base is None or base.name != chunk.base:
            raise FrameRefused(Reason.UNEXPECTED, f"a delta to version {chunk.base!r}")
        else:
            if size >= len(place):
                raise FrameRefused(Reason.TOO_LONG, "a delta that is longer than its chunk")
            place[:] = base.chunk(chunk.index)
            delta.apply(place, b"".join(parts))
        if checksum([place.data]) != chunk.checksum:
            raise FrameRefused(Reason.MALFORMED, f"the checksum of chunk {chunk.index} is wrong")
        self.checksums[chunk.index] = chunk.checksum
        self.missing.discard(chunk.index)
