"""The index of a checkpoint's tensors, `state/index.json`. Light: no torch.

```
{"tensors": {"weights/policy/lm_head.weight": {"dtype": "float32", "shape": [64, 32], "chunks": [
  {"file": "weights-00000-00001.safetensors", "key": "...", "offsets": [0, 0], "sizes": [32, 32]},
  {"file": "weights-00001-00001.safetensors", "key": "...", "offsets": [32, 0], ...}]}, ...},
 "values": {what is not a tensor}}
```

Each rank writes its chunks to its own files, and lists them, last, in `state/part-RANK.json`. Rank
0 waits for all parts and merges them. Each of any number of ranks reads the chunks that it needs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.manifest import FileDigest

STATE = "state"
INDEX = f"{STATE}/index.json"
WEIGHTS = ("model/", INDEX, f"{STATE}/weights-")
"""Prefixes of the files that suffice to make a model."""


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor, in a safetensors file."""

    file: str
    key: str
    offsets: tuple[int, ...]
    """Position of its first element in the whole tensor."""
    sizes: tuple[int, ...]


class SavedTensor(msgspec.Struct, frozen=True):
    """One tensor and the chunks that it consists of."""

    dtype: str
    """torch's name without prefix: "float32"."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Part(msgspec.Struct, frozen=True):
    """The chunks and values that one rank wrote."""

    tensors: dict[str, SavedTensor]
    files: dict[str, FileDigest]


class Index(msgspec.Struct, frozen=True):
    """The contents of state/index.json."""

    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    """Everything that is not a tensor, as JSON types."""


def part_path(folder: Path, rank: int) -> Path:
    """Path at which a rank lists what it wrote, in the unfinished checkpoint."""
    return folder / STATE / f"part-{rank:05d}.json"


def merge(parts: Sequence[Part], values: dict[str, Any]) -> Index:
    """Merge the parts of all ranks, in order. Raises CheckpointError if a tensor is incomplete.

    >>> left = SavedTensor("int64", (4,), (Chunk("0.safetensors", "x", (0,), (2,)),))
    >>> right = SavedTensor("int64", (4,), (Chunk("1.safetensors", "x", (2,), (2,)),))
    >>> index = merge([Part({"x": left}, {}), Part({"x": right}, {})], {})
    >>> [chunk.file for chunk in index.tensors["x"].chunks]
    ['0.safetensors', '1.safetensors']
    """
    tensors: dict[str, SavedTensor] = {}
    for part in parts:
        for name, one in part.tensors.items():
            known = tensors.get(name)
            if known is not None and (known.dtype, known.shape) != (one.dtype, one.shape):
                raise CheckpointError(f"ranks disagree on {name}: {known} and {one}")
            chunks = (() if known is None else known.chunks) + one.chunks
            tensors[name] = SavedTensor(one.dtype, one.shape, chunks)
    for name, one in tensors.items():
        _check_whole(name, one)
    return Index(tensors, values)


def read_index(checkpoint: Path) -> Index:
    """Read the index of a checkpoint whose files were verified. Raises CheckpointError."""
    path = checkpoint / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for name, one in index.tensors.items():
        try:
            _check_whole(name, one)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return index


def _check_whole(name: str, one: SavedTensor) -> None:
    """Refuse chunks that reach outside the tensor, overlap, or leave gaps."""
    for chunk in one.chunks:
        if Path(chunk.file).name != chunk.file:
            raise CheckpointError(f"{name} is in {chunk.file!r}, a path outside its folder")
        if not len(chunk.offsets) == len(chunk.sizes) == len(one.shape) or any(
            at < 0 or size < 0 or at + size > end
            for at, size, end in zip(chunk.offsets, chunk.sizes, one.shape, strict=True)
        ):
            raise CheckpointError(f"{name} has a chunk outside its shape {one.shape}")
    if sum(math.prod(chunk.sizes) for chunk in one.chunks) != math.prod(one.shape):
        raise CheckpointError(f"the chunks of {name} do not make up its shape {one.shape}")
    boxes = sorted(one.chunks, key=lambda chunk: chunk.offsets)
    for at, chunk in enumerate(boxes):
        for other in boxes[at + 1 :]:
            if one.shape and other.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                break
            if _overlap(chunk, other):
                raise CheckpointError(f"chunks of {name} overlap")


def _overlap(one: Chunk, other: Chunk) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in spans)
