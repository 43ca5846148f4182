"""The layout of published weights. Imports no torch: every process loads the messages.

bytes 0-7   int64, little-endian: the policy version in the file, or -1 while it is written
bytes 64-   tensors, row-major, each at a 64-byte boundary, as listed in the manifest
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Literal

import msgspec

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, and files there have mode 0600
HEADER_BYTES = 64
"""Tensors begin here, so that the first one is aligned. The version is in the first 8 bytes."""
ALIGNMENT = 64
WRITING = -1
"""Version in the header while the tensors after it belong to no version."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: contiguous, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file, 64-byte aligned."""
    nbytes: int


def laid_out(
    tensors: Iterable[tuple[str, str, int, tuple[int, ...]]],
) -> tuple[tuple[TensorSpec, ...], int]:
    """Place tensors (name, data type, bytes of an element, shape) one after the other in a file.

    Returns their specs and the file's size.
    """
    specs: list[TensorSpec] = []
    end = HEADER_BYTES
    for name, dtype, itemsize, shape in tensors:
        nbytes = itemsize * math.prod(shape)
        specs.append(TensorSpec(name, dtype, shape, end, nbytes))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs), end


class TensorDigest(msgspec.Struct, frozen=True, array_like=True):
    """Equal for equal tensors of one data type; see `asyncrl.wire.weights.fingerprint`."""

    dtype: str
    value: str
    """Digest of all elements, 32 hexadecimal digits; "" if only a probe is possible."""
    probe: str
    """Digest of the elements of a few columns, 32 hexadecimal digits."""

    def agrees_with(self, other: TensorDigest) -> bool:
        """Return True if both can be of the same numbers, in the same data type."""
        whole = self.value and other.value
        is_equal = self.value == other.value if whole else self.probe == other.probe
        return self.dtype == other.dtype and is_equal


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of a model's weights."""

    tensors: dict[str, TensorDigest]
    """Digests by name in the HF state dict."""
    whole: str
    """Digest of all of them: 32 hexadecimal digits."""


class BroadcastPlace(msgspec.Struct, frozen=True):
    """A sender that broadcasts a version on request (`asyncrl.wire.weights.broadcast`)."""

    host: str
    port: int
    sender: str
    """Unlike any other sender that ever listened there."""


Outcome = Literal["whole", "overwritten", "broken"]
"""Outcome of a broadcast: all members have the version; the trainer has published two more since;
or a member was lost or too slow, and all of them read the file."""


class ControlCode(IntEnum):
    """Announces what a broadcast sends next, before each chunk, as `[4]` int64.

    The policy version and the chunk's index reveal a member that is out of step.
    """

    CHUNK = 1
    WHOLE = 2
    """The end; the version was unchanged while each chunk was read."""
    OVERWRITTEN = 3
    """The end; the trainer has begun to overwrite the version."""


ADAPTER_ENDINGS = (".lora_A.default.weight", ".lora_B.default.weight")
"""Endings that peft adds to the name of an adapted layer; "default" is the adapter's name."""


class LoraSpec(msgspec.Struct, frozen=True):
    """Marks tensors that are those of a LoRA adapter (`asyncrl.wire.weights.adapter`) only."""

    rank: int
    scaling: float
    serve: Literal["merged", "adapter"] = "merged"
    """adapter: engines keep it apart from the model; `WeightManifest.fingerprint` then covers the
    model's own weights and A and scaling * B, in the engines' data type."""


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of all weights, or of an adapter that is added to the model's own."""

    policy_version: int
    path: str
    """A file in memory (under /dev/shm), mode 0600, readable by this user's processes."""
    nbytes: int
    tensors: tuple[TensorSpec, ...]
    fingerprint: Fingerprint | None = None
    """Fingerprint of the trainer's parameters in the engines' data type; None: not from a
    trainer."""
    broadcast: BroadcastPlace | None = None
    """The sender that broadcasts this version on request; None: only the file."""
    lora: LoraSpec | None = None
    """Set if the tensors are an adapter's; `fingerprint` then covers the weights with the adapter
    merged into them, unless it is served apart."""
