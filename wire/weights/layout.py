"""The layout of published weights. Imports no torch: every process loads the messages.

bytes 0-7   int64, little-endian: the policy version in the file, or -1 while it is written
bytes 64-   tensors, row-major, each at a 64-byte boundary, as listed in the manifest
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, and files there have mode 0600
"""Where weights are published."""
HEADER_BYTES = 64
"""Tensors begin here, so that the first one is aligned. The version is in the first 8 bytes."""
ALIGNMENT = 64
"""Bytes; a cache line."""
WRITING = -1
"""The version in the header while the tensors after it belong to no version."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: contiguous, row-major."""

    name: str
    """As in the HF state dict."""
    dtype: str
    """torch's name without prefix: "float32", "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file, 64-byte aligned."""
    nbytes: int


def laid_out(
    tensors: Iterable[tuple[str, str, int, tuple[int, ...]]],
) -> tuple[tuple[TensorSpec, ...], int]:
    """Where tensors lie in a file, one after the other, and the file's size.

    Args:
        tensors: name, data type, bytes of an element and shape of each.
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
    """In which the numbers are: torch's name without prefix."""
    value: str
    """Of all elements, 32 hexadecimal digits; "" where only a probe is possible."""
    probe: str
    """Of the elements of a few columns, 32 hexadecimal digits."""

    def agrees_with(self, other: TensorDigest) -> bool:
        """Whether both can be of the same numbers, in the same data type."""
        mine, theirs = (
            (self.value, other.value)
            if self.value and other.value
            else (
                self.probe,
                other.probe,
            )
        )
        return self.dtype == other.dtype and mine == theirs


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests of a model's weights."""

    tensors: dict[str, TensorDigest]
    """By name in the HF state dict."""
    whole: str
    """One digest of all of them: 32 hexadecimal digits."""


class BroadcastPlace(msgspec.Struct, frozen=True):
    """Where a version can be asked for and is sent to all (`asyncrl.wire.weights.broadcast`)."""

    host: str
    port: int
    sender: str
    """Unlike any other sender that ever listened there."""


ADAPTER_ENDINGS = (".lora_A.default.weight", ".lora_B.default.weight")
"""What peft puts behind the name of an adapted layer; "default" is the adapter's name."""


class LoraSpec(msgspec.Struct, frozen=True):
    """The tensors are those of a LoRA adapter (`asyncrl.wire.weights.adapter`), and no others."""

    rank: int
    scaling: float
    serve: Literal["merged", "adapter"] = "merged"
    """adapter: engines keep it apart from the model; `WeightManifest.fingerprint` is then of the
    model's own weights and of A and scaling * B, in the engines' data type."""


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of all weights, or of an adapter that is added to the model's own."""

    policy_version: int
    path: str
    """A file in memory (under /dev/shm), mode 0600, readable by this user's processes."""
    nbytes: int
    """Size of the file."""
    tensors: tuple[TensorSpec, ...]
    fingerprint: Fingerprint | None = None
    """Of the trainer's own parameters, in the data type that engines decode with; None: the weights
    do not come from a trainer."""
    broadcast: BroadcastPlace | None = None
    """The trainer broadcasts this version to those who ask there; the file has it too. None: the
    file only."""
    lora: LoraSpec | None = None
    """The tensors are an adapter's, and `fingerprint` is of the weights with the adapter merged
    into them, unless it is served apart. None: they are all weights."""
