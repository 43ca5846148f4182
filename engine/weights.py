"""Reading the weights that a trainer on this machine published in shared memory.

The file's first 8 bytes name the policy version in it, or -1 while the trainer writes (see
`wire.weights.layout`). Two files take turns, so a version stays readable until the one
after the next is begun; a reader that is slower than that learns it here, by an exception.

Example:
    ```python
    with read_weights(manifest) as tensors:
        staged = {name: tensor.clone() for name, tensor in tensors}
    install(staged)  # only here it is certain that no tensor was torn
    ```
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.errors import WeightsError, WeightsSupersededError
from wire.weights.layout import HEADER_BYTES, TensorSpec, WeightManifest

if TYPE_CHECKING:
    import torch


MADV_POPULATE_READ = 22
"""Linux's number; Python's mmap has no name for it yet."""


@contextmanager
def read_weights(
    manifest: WeightManifest,
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Map a published version; yields (name, tensor) pairs, as in the HF state dict.

    Tensors are views of the mapping, not copies: valid inside the block only, and to be read
    only (writing to one changes a private page and nothing else). What was taken from them may be
    used once the block has ended without an exception.

    Raises (WeightsError also while iterating, for an impossible tensor in the manifest):
        WeightsSupersededError: at the start or the end of the block, or after the last tensor:
            the file no longer holds this version, what was read must be thrown away.
        WeightsError: the file is gone, not ours, or the manifest does not describe it.
    """
    descriptor = _open(manifest)
    try:
        _check_version(descriptor, manifest)
        # Private: a reader's mistake can never reach the trainer's file.
        memory = mmap.mmap(descriptor, manifest.nbytes, access=mmap.ACCESS_COPY)
        _map_pages(memory)
        yield _views(descriptor, manifest, memory)
        _check_version(descriptor, manifest)
    finally:
        os.close(descriptor)


def _views(
    descriptor: int, manifest: WeightManifest, memory: mmap.mmap
) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in manifest.tensors:
        yield spec.name, _view(memory, spec, manifest.nbytes)
    # Here already, so that whoever copies all of them hears of it before putting them to use.
    _check_version(descriptor, manifest)


def _map_pages(memory: mmap.mmap) -> None:
    """Map all pages at once, without copying them: faulting them in one by one takes longer."""
    try:
        memory.madvise(MADV_POPULATE_READ)
    except OSError as error:
        # Linux before 5.14 does not know the advice; reading works all the same.
        if error.errno != errno.EINVAL:
            raise WeightsError(f"cannot map the weights: {error}") from error


def _open(manifest: WeightManifest) -> int:
    try:
        descriptor = os.open(manifest.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(
            f"weights of version {manifest.policy_version} cannot be opened ({error}): "
            "is the trainer on this machine, under this user, with the same /dev/shm?"
        ) from error
    found = os.fstat(descriptor)
    if found.st_size != manifest.nbytes or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise WeightsError(
            f"{manifest.path} is not what the manifest of version {manifest.policy_version} "
            f"describes: {found.st_size} bytes of user {found.st_uid}, expected "
            f"{manifest.nbytes} bytes of user {os.geteuid()}"
        )
    return descriptor


def _check_version(descriptor: int, manifest: WeightManifest) -> None:
    header = int.from_bytes(os.pread(descriptor, 8, 0), "little", signed=True)
    if header != manifest.policy_version:
        now = "newer weights are being written" if header < 0 else f"it holds version {header}"
        raise WeightsSupersededError(
            f"weights of version {manifest.policy_version} in {manifest.path} are superseded: {now}"
        )


def _view(memory: mmap.mmap, spec: TensorSpec, end: int) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"tensor {spec.name}: unknown type {spec.dtype!r}")
    count = math.prod(spec.shape)
    inside = spec.offset >= HEADER_BYTES and spec.offset + spec.nbytes <= end
    if not inside or min(spec.shape, default=0) < 0 or count * dtype.itemsize != spec.nbytes:
        raise WeightsError(
            f"tensor {spec.name}: {spec.shape} {spec.dtype} does not fill {spec.nbytes} bytes "
            f"at {spec.offset} of {end}"
        )
    if not count:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)
