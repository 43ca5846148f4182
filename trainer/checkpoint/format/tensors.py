"""Writes named tensors to the files of a checkpoint and reads them, sharded or not.

The planner of `torch.distributed.checkpoint` (DCP) finds which saved chunks overlap with what a
rank holds. Its storage and its exchange of plans between ranks, both pickles, are not used: the
files are safetensors, the index is JSON (`asyncrl.trainer.checkpoint.format.index`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.index import STATE, Chunk, Index, Part, SavedTensor
from asyncrl.trainer.checkpoint.format.manifest import digest_of
from asyncrl.wire.transport.atomic_files import sync
from asyncrl.wire.weights.fingerprint import name_of

_FILE_BYTES = 1 << 30
"""Size at which a new file is begun, for less memory for copies and parallel verification."""


@dataclass(frozen=True, slots=True)
class Box:
    """This rank's part of a tensor: all of it, or a box.

    >>> Box.of(torch.zeros(2, 3)).offsets
    (0, 0)
    >>> Box(torch.zeros(2, 3), shape=(8, 3), offsets=(4, 0)).is_whole
    False
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Position of the box's first element."""
    is_written: bool = True
    """False if another rank holds the same box and writes it."""

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Wrap a plain tensor, which is whole, or this rank's shard of a DTensor on any mesh.

        If several ranks hold a shard (a mesh that also replicates), the first writes it.
        """
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
        (item,) = create_default_local_save_plan({"": tensor}, is_coordinator=True).items
        at = tensor.device_mesh.get_coordinate() or ()
        again = any(i and p.is_replicate() for i, p in zip(at, tensor.placements, strict=True))
        offsets = tuple(item.index.offset or ())
        return cls(tensor.to_local(), tuple(tensor.shape), offsets, not again)

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the whole tensor."""
        return tuple(self.local.shape) == self.shape


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's part of one tensor, to write."""

    name: str
    box: Box

    @property
    def local(self) -> Tensor:
        """Elements of the box."""
        return self.box.local

    @property
    def key(self) -> str:
        """Name in a file."""
        if self.box.is_whole:
            return self.name
        return f"{self.name}@{','.join(map(str, self.box.offsets))}"


def held_by(boxes: Mapping[str, Box], rank: int) -> list[Held]:
    """Tensors that this rank writes: its boxes; on rank 0 also those that each rank holds whole."""
    return [
        Held(name, box)
        for name, box in boxes.items()
        if box.is_written
        and (rank == 0 or not box.is_whole or name.startswith(f"random/{rank}/"))
        and (box.local.numel() or box.is_whole)
    ]


def write_tensors(directory: Path, held: Sequence[Held], rank: int) -> Part:
    """Write this rank's files to `directory/state/`, synced. Raises OSError, SafetensorError."""
    tensors: dict[str, SavedTensor] = {}
    files = {}
    for name, part in _files(held, rank):
        path = directory / STATE / name
        save_file({one.key: _saveable(one.local) for one in part}, path)
        files[f"{STATE}/{name}"] = digest_of(path)
        sync(path)
        for one in part:
            chunk = Chunk(name, one.key, one.box.offsets, tuple(one.local.shape))
            tensors[one.name] = SavedTensor(name_of(one.local.dtype), one.box.shape, (chunk,))
    return Part(tensors, files)


def load_tensors(checkpoint: Path, index: Index, boxes: Mapping[str, Box]) -> None:
    """Fill boxes, which may differ from the saved ones.

    Raises CheckpointError for a missing tensor or another shape or type; OSError, SafetensorError.
    """
    by_file: defaultdict[str, list[tuple[Chunk, ReadItem, Tensor]]] = defaultdict(list)
    for name, box in boxes.items():
        saved = index.tensors.get(name)
        if saved is None or (name_of(box.local.dtype), box.shape) != (saved.dtype, saved.shape):
            raise CheckpointError(f"{checkpoint} is of another model: {name} is missing or differs")
        if not box.local.numel():
            continue
        wanted = metadata.ChunkStorageMetadata(torch.Size(box.offsets), box.local.shape)
        chunks = {one.offsets: one for one in saved.chunks}
        for item in create_read_items_for_chunk_list(name, _known(saved), [wanted]):
            chunk = chunks[tuple(item.storage_index.offset or ())]
            by_file[chunk.file].append((chunk, item, box.local))
    for file_name, reads in by_file.items():
        with safe_open(checkpoint / STATE / file_name, framework="pt") as file:
            for chunk, item, local in reads:
                local[_slices(item.dest_offsets, item)].copy_(_read(file, chunk, item))


def _slices(offsets: Sequence[int], item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, item.lengths, strict=True))


def _read(file: safe_open, chunk: Chunk, item: ReadItem) -> Tensor:
    if not chunk.sizes or tuple(item.lengths) == chunk.sizes:
        whole: Tensor = file.get_tensor(chunk.key)
        return whole
    part: Tensor = file.get_slice(chunk.key)[_slices(item.storage_offsets, item)]
    return part


def _known(saved: SavedTensor) -> metadata.TensorStorageMetadata:
    """Metadata for the planner, without chunks of size 0, which overlap with nothing."""
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes))
        for one in saved.chunks
    ]
    kind = metadata.TensorProperties(getattr(torch, saved.dtype))
    return metadata.TensorStorageMetadata(kind, torch.Size(saved.shape), chunks)


def _files(held: Sequence[Held], rank: int) -> Iterator[tuple[str, list[Held]]]:
    """File names and contents: weights separate from what only training needs."""
    for kind, of_weights in (("weights", True), ("training", False)):
        chosen = [one for one in held if one.name.startswith("weights/") == of_weights]
        for number, part in enumerate(_parts(chosen), start=1):
            yield f"{kind}-{rank:05d}-{number:05d}.safetensors", part


def _parts(held: Iterable[Held]) -> Iterator[list[Held]]:
    part: list[Held] = []
    size = 0
    for one in held:
        part.append(one)
        size += one.local.nbytes
        if size >= _FILE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _saveable(tensor: Tensor) -> Tensor:
    """Move a tensor to the host, contiguous and whole: entries of a file may not share memory."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    return tensor.to("cpu", copy=True).contiguous()
