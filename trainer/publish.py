"""Weights from the trainer to the generators of one machine, through shared memory.

Two files under /dev/shm take turns, so that version v stays readable while v + 1 is written:

```
bytes 0-7   int64, little-endian: the policy version in the file, or -1 while it is being written
bytes 64-   tensors, row-major, each at a 64-byte boundary, as listed in the manifest
```

The writer sets -1, copies, then sets the version; the reader (`engine.weights`) takes nothing for
valid unless the header names its version before and after. No disk, no serialisation: one copy
here, none or one there. A file is only ever mode 0600.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from trainer.errors import PublishError
from wire.weights.layout import HEADER_BYTES, TensorSpec, WeightManifest

ALIGNMENT = 64
"""Bytes; a cache line."""
WRITING = -1
"""The header while the tensors behind it are of no version."""


@dataclass(slots=True)
class _Slot:
    """One of the two files: its mapping, and one tensor view per published tensor."""

    path: Path
    memory: mmap.mmap
    views: list[Tensor]

    def mark(self, version: int) -> None:
        self.memory[:8] = version.to_bytes(8, "little", signed=True)


class WeightPublisher:
    """Writes versions of one model's weights. Not thread-safe; one per trainer.

    Args:
        directory: in memory, usually /dev/shm.
        run_id: names the files; letters, digits, dot, dash, underscore. Unique on this machine.

    Raises:
        PublishError: an impossible run id.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", run_id):
            raise PublishError(
                f"run id {run_id!r}: only letters, digits, dots, dashes and underscores"
            )
        self._paths = [directory / f"asyncrl-{run_id}-weights-{i}" for i in (0, 1)]
        self._slots: list[_Slot] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._nbytes = 0
        self._published = 0

    def publish(self, tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> WeightManifest:
        """Copy these tensors into the next file and mark it with the version.

        The first call fixes names, types and shapes and reserves the memory.

        Raises:
            PublishError: no room, a negative version, or tensors unlike those of the first call.
        """
        if policy_version < 0:
            raise PublishError(f"policy versions are 0 or more, got {policy_version}")
        named = list(tensors)
        if not self._slots:
            self._reserve(named)
        self._check(named)
        slot = self._slots[self._published % 2]
        slot.mark(WRITING)
        with torch.no_grad():
            for view, (_, tensor) in zip(slot.views, named, strict=True):
                view.copy_(tensor)
        slot.mark(policy_version)
        self._published += 1
        return WeightManifest(policy_version, str(slot.path), self._nbytes, self._specs)

    def close(self) -> None:
        """Unlink the files. Readers that have them mapped keep their pages. Idempotent."""
        while self._slots:
            slot = self._slots.pop()
            # The views hold the mapping open; both end with the slot.
            slot.views.clear()
            slot.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, named: list[tuple[str, Tensor]]) -> None:
        specs = []
        end = HEADER_BYTES
        for name, tensor in named:
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name, dtype, tuple(tensor.shape), end, tensor.nbytes))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._specs, self._nbytes = tuple(specs), end
        try:
            for path in self._paths:
                self._slots.append(_slot(path, self._specs, end))
        except PublishError:
            self.close()
            raise

    def _check(self, named: list[tuple[str, Tensor]]) -> None:
        if len(named) != len(self._specs):
            raise PublishError(
                f"{len(named)} tensors, but the first version had {len(self._specs)}"
            )
        for spec, (name, tensor) in zip(self._specs, named, strict=True):
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (spec.name, spec.dtype, spec.shape) != (name, dtype, tuple(tensor.shape)):
                raise PublishError(
                    f"tensor {name} {dtype} {tuple(tensor.shape)} where the first version had "
                    f"{spec.name} {spec.dtype} {spec.shape}"
                )


def _slot(path: Path, specs: tuple[TensorSpec, ...], nbytes: int) -> _Slot:
    """Create one file with all its memory reserved, marked as being written."""
    # A killed run of this id may have left one; O_EXCL keeps a planted link from being followed.
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise PublishError(f"cannot create {path}: {error}") from error
    try:
        # Reserved now: running out later would be a SIGBUS in the middle of a copy.
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise PublishError(_no_room(path, nbytes, error)) from error
    finally:
        os.close(descriptor)
    slot = _Slot(path, memory, [_view(memory, spec) for spec in specs])
    slot.mark(WRITING)
    return slot


def _view(memory: mmap.mmap, spec: TensorSpec) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    count = spec.nbytes // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset)
    return flat.view(spec.shape)


def _no_room(path: Path, nbytes: int, error: OSError) -> str:
    if error.errno != errno.ENOSPC:
        return f"cannot reserve {nbytes} bytes for {path}: {error}"
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    return (
        f"{path.parent} has {free / 2**20:.0f} MiB free, two versions of the weights need "
        f"{2 * nbytes / 2**20:.0f} MiB: make it larger (docker run --shm-size, or a tmpfs mount)"
    )
