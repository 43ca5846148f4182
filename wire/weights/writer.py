"""Publishes weights to the engines of one machine, through shared memory.

Two files under /dev/shm alternate, so that version v stays readable while v + 1 is written. The
writer sets the version in the header to -1, copies the tensors in the engines' data type, then sets
the new version. The reader (`asyncrl.wire.weights.reader`) accepts a copy only if the header names
its version before and after. No lock: a slow or dead engine cannot delay the trainer.
"""

import mmap
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from asyncrl.wire.errors import PublishError
from asyncrl.wire.weights.files import mark, marked, reserve
from asyncrl.wire.weights.layout import (
    SHARED_MEMORY,
    WRITING,
    Fingerprint,
    LoraSpec,
    TensorSpec,
    WeightManifest,
    laid_out,
)
from asyncrl.wire.weights.memory import Pin, tensor_view


@dataclass(slots=True)
class _Slot:
    path: Path
    memory: mmap.mmap
    views: list[Tensor]
    pin: Pin | None = None
    """Pin of the mapping, if the tensors come from a GPU."""


class WeightPublisher:
    """Writes versions of one model's weights. Not thread-safe; one per trainer.

    `directory` is in memory, usually /dev/shm. `run_id` names the files, unique on this machine:
    letters, digits, dot, dash, underscore; otherwise PublishError is raised. Floating-point tensors
    are converted to `dtype` (None: published as they are). Of `files` alternating files, a version
    is overwritten by the one `files` later. `lora` is set if an adapter is published.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        dtype: torch.dtype | None = None,
        files: int = 2,
        lora: LoraSpec | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", run_id):
            raise PublishError(
                f"run id {run_id!r} may only have letters, digits, dots, dashes and underscores"
            )
        self._paths = [directory / f"asyncrl-{run_id}-weights-{i}" for i in range(files)]
        self._dtype = dtype
        self._lora = lora
        self._slots: list[_Slot] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._nbytes = 0
        self._published = 0

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        policy_version: int,
        fingerprint: Fingerprint | None = None,
        whole: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> WeightManifest:
        """Copy these tensors into the next file and set its version, at least 0.

        The first call fixes names, data types and shapes, and reserves the memory. `fingerprint`,
        of the publisher's tensors, travels in the manifest. `whole` joins a tensor that is in
        parts, in the type in which it is published, one at a time.

        Raises PublishError if there is not enough memory, the version is negative, a name comes
        twice, or the tensors differ from those of the first call.
        """
        if policy_version < 0:
            raise PublishError(f"policy_version must be 0 or more, got {policy_version}")
        named = list(tensors)
        if not self._slots:
            self._reserve(named)
        self._check(named)
        slot = self._slots[self._published % len(self._slots)]
        mark(slot.memory, WRITING)
        with torch.no_grad():
            for view, (_, tensor) in zip(slot.views, named, strict=True):
                # On a GPU the conversion comes first: `copy_` would move the wider numbers.
                own = tensor if whole is None else whole(tensor, view.dtype)
                own = own.to(view.dtype) if tensor.is_cuda else own
                view.copy_(own, non_blocking=tensor.is_cuda)
            if any(tensor.is_cuda for _, tensor in named):
                torch.cuda.synchronize()
        mark(slot.memory, policy_version)
        self._published += 1
        return WeightManifest(
            policy_version, str(slot.path), self._nbytes, self._specs, fingerprint, lora=self._lora
        )

    def tensors_of(self, policy_version: int) -> list[tuple[str, Tensor]]:
        """Return a version that is still published, valid until the next `publish`; else []."""
        for slot in self._slots:
            if marked(slot.memory) == policy_version != WRITING:
                names = [spec.name for spec in self._specs]
                return list(zip(names, slot.views, strict=True))
        return []

    def close(self) -> None:
        """Remove the files. Idempotent."""
        while self._slots:
            slot = self._slots.pop()
            # The views keep the mapping open; without them it is freed with the slot.
            slot.views.clear()
            if slot.pin is not None:
                slot.pin.release()
            slot.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, named: list[tuple[str, Tensor]]) -> None:
        twice = [n for n, times in Counter(name for name, _ in named).items() if times > 1]
        if twice:
            raise PublishError(f"tensor {twice[0]!r} was given twice")
        self._specs, self._nbytes = laid_out(
            (name, *self._published_as(tensor), tuple(tensor.shape)) for name, tensor in named
        )
        from_gpu = any(tensor.is_cuda for _, tensor in named)
        try:
            for path in self._paths:
                memory = reserve(path, self._nbytes, of=len(self._paths))
                mark(memory, WRITING)
                whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping open
                views = [tensor_view(whole, spec) for spec in self._specs]
                self._slots.append(_Slot(path, memory, views, Pin(whole) if from_gpu else None))
        except PublishError:
            self.close()
            raise

    def _published_as(self, tensor: Tensor) -> tuple[str, int]:
        """Return the name and the size in bytes of a tensor's published data type."""
        dtype = tensor.dtype
        if self._dtype is not None and tensor.is_floating_point():
            dtype = self._dtype
        return str(dtype).removeprefix("torch."), dtype.itemsize

    def _check(self, named: list[tuple[str, Tensor]]) -> None:
        if len(named) != len(self._specs):
            raise PublishError(
                f"{len(named)} tensors were given, but the first version had {len(self._specs)}"
            )
        for spec, (name, tensor) in zip(self._specs, named, strict=True):
            dtype, _ = self._published_as(tensor)
            if (spec.name, spec.dtype, spec.shape) != (name, dtype, tuple(tensor.shape)):
                raise PublishError(
                    f"tensor {name} {dtype} {tuple(tensor.shape)} was given, but the first version "
                    f"had {spec.name} {spec.dtype} {spec.shape}"
                )


@contextmanager
def published(
    tensors: Iterable[tuple[str, Tensor]], policy_version: int, directory: Path = SHARED_MEMORY
) -> Iterator[WeightManifest]:
    """Publish one version of some tensors in a file that exists only inside the block.

    Raises as `WeightPublisher.publish`.
    """
    name = f"once-{secrets.token_hex(4)}-{os.getpid()}"
    with WeightPublisher(directory, name, files=1) as publisher:
        yield publisher.publish(tensors, policy_version)
