"""The pieces in which weights travel between nodes.

A version's file is cut into chunks of one length, from the header's end to the file's. Chunk i of
every version of a model lies at the same place, so a delta names the place by i alone.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.layout import ALIGNMENT, HEADER_BYTES, TensorSpec, WeightManifest

CHUNK_BYTES = 1 << 20
"""A node passes a chunk on when it is complete, so a chain of n nodes takes as long as one link and
n - 1 chunks; a chunk costs each node some 0.2 ms of Python."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Places of the chunks of a file. Raises WeightsReadError for an impossible size."""

    nbytes: int
    """Size of the file; a multiple of 64, as `chunk_bytes`."""
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.nbytes < HEADER_BYTES or self.nbytes % ALIGNMENT or self.chunk_bytes % ALIGNMENT:
            raise WeightsReadError(
                f"a file of {self.nbytes} bytes cannot be cut into chunks of {self.chunk_bytes}: "
                f"both must be multiples of {ALIGNMENT}"
            )

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-(self.nbytes - HEADER_BYTES) // self.chunk_bytes)

    def span(self, index: int) -> slice:
        """Return the bytes of a chunk; the last one may be shorter."""
        start = HEADER_BYTES + index * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.nbytes))


def checksum(parts: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of bytes in parts: it detects damage and mistakes, not malice."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def word_bytes(tensors: Iterable[TensorSpec]) -> int:
    """Return the bytes of a word in deltas: those of most weights, 2 or 4."""
    halves = sum(
        spec.nbytes if spec.dtype in ("bfloat16", "float16") else -spec.nbytes for spec in tensors
    )
    return 2 if halves > 0 else 4


def name_of(manifest: WeightManifest) -> str:
    """Return the nodes' name of a version: equal names mean equal bytes."""
    whole = "" if manifest.fingerprint is None else manifest.fingerprint.whole
    text = f"{manifest.policy_version} {manifest.path} {manifest.nbytes} {whole}"
    return f"{manifest.policy_version}-{blake2b(text.encode(), digest_size=8).hexdigest()}"


def trainer_of(manifest: WeightManifest) -> str:
    """Return the name of a version's trainer: the path of its files without their number."""
    return manifest.path.rpartition("-")[0]


def alike(one: WeightManifest, other: WeightManifest) -> bool:
    """Return True if two versions have the same tensors at the same places."""
    return one.nbytes == other.nbytes and one.tensors == other.tensors
