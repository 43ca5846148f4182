"""Reads published weights into the reader's memory, in the reader's data types.

The trainer alternates between two files. A slower reader detects that when its copy is complete:
the header no longer names its version.

On a CPU the copy is one `pread` of the whole file into a buffer that is kept for the next version,
if it is published in the wanted data types: 0.08 s for 400 MiB on a 2-core CPU; cloning tensors
into fresh memory takes 0.6-3 s, most of it in page faults. Otherwise it goes through two small
buffers, tensor by tensor; for a GPU they are page-locked, and used in turn on a separate stream.

A version whose manifest names a sender is received from it (`asyncrl.wire.weights.broadcast`). If
that fails, the buffer logs it and reads the file.
"""

import contextlib
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.wire.errors import WeightsNotReceivedError, WeightsReadError
from asyncrl.wire.weights.broadcast.receiving import BroadcastReceiver
from asyncrl.wire.weights.files import fill, held_version
from asyncrl.wire.weights.layout import TensorSpec, WeightManifest, laid_out
from asyncrl.wire.weights.memory import Pin, dtype_of, tensor_view

logger = logging.getLogger(__name__)

DTypes = Callable[[str, torch.dtype], torch.dtype]
"""Maps a tensor's name and published data type to the data type that a reader wants."""

_STEP_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Size of the small buffers: on a CPU they stay in its cache."""
_CPU = torch.device("cpu")


class WeightBuffer:
    """A private copy of one published version. Not thread-safe.

    `wanted` are the data types of the copy (None: as published), and `device` its device. A copy in
    host memory is page-locked if `pinned`, for an engine on a GPU. A broadcast may arrive on
    `engine_device` (None: that of the copy).
    """

    def __init__(
        self,
        wanted: DTypes | None = None,
        *,
        device: torch.device = _CPU,
        pinned: bool = False,
        engine_device: torch.device | None = None,
    ) -> None:
        self._wanted = wanted or (lambda _name, published: published)
        self._device = device
        self._pins = pinned
        self._memory: Tensor | None = None
        self._pin: Pin | None = None
        self._specs: tuple[TensorSpec, ...] = ()
        self._tensors: list[tuple[str, Tensor]] = []
        self._steps: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._receiver = BroadcastReceiver(engine_device or device)
        self._missed = False
        self.policy_version: int | None = None
        """The version that the buffer holds; None: nothing complete."""

    def read(self, manifest: WeightManifest) -> None:
        """Replace the copy by this version. Raises as `held_version`, and then holds nothing."""
        self.policy_version = None
        if not self._receive(manifest):
            with held_version(manifest) as descriptor:
                memory = self._memory_for(manifest)
                if self._device.type == "cpu" and self._specs == manifest.tensors:
                    fill(memory.numpy().data, descriptor, 0)
                else:
                    with self._on_stream():
                        self._convert(descriptor, manifest)
        self.policy_version = manifest.policy_version

    def _receive(self, manifest: WeightManifest) -> bool:
        """Receive it if it is broadcast; False: it must be read. Raises WeightsReadError."""
        place = manifest.broadcast
        if place is None:
            return False
        memory = self._memory_for(manifest)
        landing = _Landing(manifest, memory, self._tensors, self._specs == manifest.tensors)
        began = time.monotonic()
        try:
            with self._on_stream():
                self._receiver.receive(manifest, place, landing)
        except WeightsNotReceivedError as error:
            logger.log(
                logging.INFO if self._missed else logging.WARNING,
                "%s; reading %s instead, %.1f s later than without broadcasts",
                error,
                manifest.path,
                time.monotonic() - began,
            )
            self._missed = True
            return False
        self._missed = False
        if self._stream is not None:
            self._stream.synchronize()
        return True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name, valid until the next `read`. Raises WeightsReadError."""
        if self.policy_version is None:
            raise WeightsReadError("no complete version of the weights has been read")
        yield from self._tensors

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return 0 if self._memory is None else self._memory.nbytes

    def _memory_for(self, manifest: WeightManifest) -> Tensor:
        """Return memory of the right size, after checking the manifest's tensors."""
        published = [dtype_of(spec, manifest.nbytes) for spec in manifest.tensors]
        wanted = list(map(self._wanted, (spec.name for spec in manifest.tensors), published))
        specs, nbytes = manifest.tensors, manifest.nbytes
        if wanted != published:
            specs, nbytes = laid_out(
                (spec.name, str(dtype).removeprefix("torch."), dtype.itemsize, spec.shape)
                for spec, dtype in zip(specs, wanted, strict=True)
            )
        if self._memory is None or len(self._memory) != nbytes:
            self._tensors = []
            if self._pin is not None:
                self._pin.release()
            self._memory = self._pin = None  # freed before the new one is taken
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._pin = Pin(self._memory) if self._pins else None
        if specs != self._specs or not self._tensors:
            self._tensors = [(spec.name, tensor_view(self._memory, spec)) for spec in specs]
        self._specs = specs
        return self._memory

    def _convert(self, descriptor: int, manifest: WeightManifest) -> None:
        pinned = self._stream is not None
        if not self._steps:
            size = _STEP_BYTES[self._device.type]
            self._steps = [
                torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
            ]
        copied: list[torch.cuda.Event | None] = [None, None]
        turn = 0
        for spec, (_, target) in zip(manifest.tensors, self._tensors, strict=True):
            dtype, flat = dtype_of(spec, manifest.nbytes), target.view(-1)
            rows = len(self._steps[0]) // dtype.itemsize
            for start in range(0, math.prod(spec.shape), rows):
                count = min(rows, len(flat) - start)
                part = self._steps[turn][: count * dtype.itemsize]
                if (event := copied[turn]) is not None:
                    event.synchronize()
                fill(part.numpy().data, descriptor, spec.offset + start * dtype.itemsize)
                flat[start : start + count].copy_(part.view(dtype), non_blocking=pinned)
                if self._stream is not None:
                    copied[turn] = self._stream.record_event()
                turn = 1 - turn
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Landing(NamedTuple):
    """Puts chunks of a version into a buffer, a `broadcast.receiving.Landing`."""

    manifest: WeightManifest
    memory: Tensor
    tensors: list[tuple[str, Tensor]]
    as_published: bool
    """True if the tensors have their published data types."""

    def room(self, span: slice, device: torch.device) -> Tensor | None:
        """Return the buffer's memory, if bytes stay as they are and where they arrive."""
        fits = self.as_published and self.memory.device == device
        return self.memory[span] if fits else None

    def put(self, span: slice, part: Tensor) -> None:
        """Copy the elements of a chunk into the tensors, converting the data type and device."""
        if self.as_published:
            self.memory[span].copy_(part)
            return
        specs = self.manifest.tensors
        first = max(0, bisect_right(specs, span.start, key=attrgetter("offset")) - 1)
        for spec, (_, target) in zip(specs[first:], self.tensors[first:], strict=True):
            if spec.offset >= span.stop:
                break
            start = max(span.start, spec.offset)
            stop = min(span.stop, spec.offset + spec.nbytes)
            if start >= stop:
                continue
            # Tensors and chunks begin at multiples of 64 bytes, so no element is cut.
            dtype = dtype_of(spec, self.manifest.nbytes)
            own = part[start - span.start : stop - span.start].view(dtype)
            begin = (start - spec.offset) // own.element_size()
            target.view(-1)[begin : begin + len(own)].copy_(own)
