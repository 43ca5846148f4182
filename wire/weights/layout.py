"""Where a version of the weights lies in shared memory.

The file begins with an 8-byte little-endian signed integer: the policy version that it holds, or
-1 while the trainer writes. A reader copies, then checks that the header still names its version;
otherwise newer weights are on their way and the copy is thrown away.
"""

from __future__ import annotations

import msgspec

HEADER_BYTES = 64
"""Tensors begin here, so that the first one is aligned; the version is in the first 8 bytes."""


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


class WeightManifest(msgspec.Struct, frozen=True):
    """One version of all weights."""

    policy_version: int
    path: str
    """A file in memory (under /dev/shm), mode 0600, mapped by every process of this machine."""
    nbytes: int
    tensors: tuple[TensorSpec, ...]
