"""Reads published weights into memory of the reader's own.

The trainer alternates between two files, so a version stays readable until the one after the next
is begun. A reader that is slower than that notices when its copy is complete: the header no longer
names its version.

The copy is one `pread` of the whole file into a buffer that is kept for the next version. Measured
on a 2-core CPU with 400 MiB: 0.08 s; cloning tensors into fresh memory takes 0.6-3 s, most of it in
page faults.

Example:
    ```python
    buffer = WeightBuffer()
    buffer.read(manifest)  # raises if the version was overwritten meanwhile
    for name, tensor in buffer.tensors():
        parameters[name].copy_(tensor)
    ```
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from torch import Tensor

from wire.errors import WeightsReadError, WeightsSupersededError
from wire.weights.layout import WeightManifest
from wire.weights.views import tensor_view

_CHUNK_BYTES = 1 << 28
"""One system call reads at most 2 GiB."""


class WeightBuffer:
    """A private copy of one published version, as large as its file. Not thread-safe."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._tensors: list[tuple[str, Tensor]] = []
        self.policy_version: int | None = None
        """The version that the buffer holds; None: nothing whole."""

    def read(self, manifest: WeightManifest) -> None:
        """Copy a published version into the buffer, replacing the one before.

        If it raises, the buffer holds nothing.

        Raises:
            WeightsSupersededError: the file no longer holds this version, or was removed.
            WeightsReadError: the file is not ours, or the manifest does not describe it.
        """
        self.policy_version = None
        descriptor = _open(manifest)
        try:
            _check_version(descriptor, manifest)
            memory = self._memory_for(manifest)
            _copy(descriptor, memory)
            _check_version(descriptor, manifest)
        except OSError as error:
            raise WeightsReadError(
                f"weights of version {manifest.policy_version} in {manifest.path} cannot be "
                f"read: {error}"
            ) from error
        finally:
            os.close(descriptor)
        self.policy_version = manifest.policy_version

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in the HF state dict, and tensors that are valid until the next `read`.

        Raises:
            WeightsReadError: the buffer holds no whole version.
        """
        if self.policy_version is None:
            raise WeightsReadError("no whole version of the weights has been read")
        yield from self._tensors

    def _memory_for(self, manifest: WeightManifest) -> mmap.mmap:
        """Memory of the manifest's size; its tensors are checked before a byte is copied."""
        if self._memory is None or len(self._memory) != manifest.nbytes:
            self._tensors = []
            self._memory = None  # the old buffer is freed before the new one is taken
            self._memory = mmap.mmap(-1, manifest.nbytes)
        memory = self._memory
        self._tensors = [(spec.name, tensor_view(memory, spec)) for spec in manifest.tensors]
        return memory


def _open(manifest: WeightManifest) -> int:
    try:
        descriptor = os.open(manifest.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise WeightsSupersededError(
            f"weights of version {manifest.policy_version} were removed: {manifest.path} is gone, "
            "with its trainer, or it never was on this machine"
        ) from error
    except OSError as error:
        raise WeightsReadError(
            f"weights of version {manifest.policy_version} cannot be opened ({error}): "
            "is the trainer on this machine, under this user, with the same /dev/shm?"
        ) from error
    found = os.fstat(descriptor)
    if found.st_size != manifest.nbytes or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise WeightsReadError(
            f"{manifest.path} is not what the manifest of version {manifest.policy_version} "
            f"describes: {found.st_size} bytes of user {found.st_uid}, expected "
            f"{manifest.nbytes} bytes of user {os.geteuid()}"
        )
    return descriptor


def _copy(descriptor: int, memory: mmap.mmap) -> None:
    """Fill `memory` from the file. Other threads run meanwhile."""
    with memoryview(memory) as target:
        done = 0
        while done < len(target):
            with target[done : done + _CHUNK_BYTES] as part:
                read = os.preadv(descriptor, [part], done)
            if not read:
                raise WeightsReadError(f"the weights file ends after {done} of {len(target)} bytes")
            done += read


def _check_version(descriptor: int, manifest: WeightManifest) -> None:
    header = int.from_bytes(os.pread(descriptor, 8, 0), "little", signed=True)
    if header != manifest.policy_version:
        now = "newer weights are being written" if header < 0 else f"it holds version {header}"
        raise WeightsSupersededError(
            f"weights of version {manifest.policy_version} in {manifest.path} are superseded: {now}"
        )
