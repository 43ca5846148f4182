"""Finds the weight files of a model directory and reads their headers.

Repositories may hold several copies: Mistral's `consolidated.safetensors`, old shards beside a new
file, `model.fp16.safetensors`, an adapter. As in transformers, `model.safetensors` counts, or the
files that the index names. Only headers are read.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 * 2**20
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)

BYTES = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "F32"), 4),
    **dict.fromkeys(("I64", "F64"), 8),
}
"""Bytes per number, by the type's name in a header. Other types are not loaded."""


def weight_files(model: Path) -> list[Path]:
    """Return the weight files to load, existing or not. Raises ValueError for a bad index."""
    if (model / WHOLE).is_file():  # transformers takes it before an index
        return [model / WHOLE]
    index = model / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [model / name for name in names]
    except DAMAGED as error:
        raise ValueError(f"{index} is damaged: {error}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names a file of another folder: {outside[0]}")
    return files


def why_no_tensor(name: str, entry: dict[str, Any]) -> str | None:
    """Describe what is wrong with a header's entry, or return None. Raises one of `DAMAGED`."""
    dtype, shape = entry["dtype"], entry["shape"]
    offsets: Any = entry.get("data_offsets")
    if dtype not in BYTES:
        return f"that {name} has the type {dtype!r}, which is not supported"
    whole = all(isinstance(one, int) and one >= 0 for one in shape)
    if not isinstance(shape, list) or not whole:
        return f"that {name} has the shape {shape!r}"
    size = math.prod(shape) * BYTES[dtype]
    is_pair = isinstance(offsets, list) and [type(one) for one in offsets] == [int, int]
    if not is_pair or offsets[0] < 0 or offsets[1] - offsets[0] != size:
        return f"that {name}, of {size:,} bytes, has the place {offsets!r}"
    return None


def header_of(file: Path) -> dict[str, Any]:
    """Return a file's tensor descriptions by name. Raises one of `DAMAGED`."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER:
            raise ValueError("the header is too long")
        header: dict[str, Any] = json.loads(opened.read(length))
    return {name: one for name, one in header.items() if name != "__metadata__"}


def headers_of(model: Path) -> dict[str, Any]:
    """Return the tensor descriptions of all weight files by name. Raises one of `DAMAGED`."""
    found: dict[str, Any] = {}
    for file in weight_files(model):
        found |= header_of(file)
    return found


def parameters(model: Path) -> int | None:
    """Return the number of parameters of a model directory, counting tied ones once.

    Return None without weights, or if they are damaged, which `model_check` reports in time.
    """
    try:
        sizes = [math.prod(one["shape"]) for one in headers_of(model).values()]
    except DAMAGED:
        return None
    return sum(sizes) if sizes else None


@contextmanager
def only_what_counts(model: Path) -> Iterator[Path]:
    """Yield the model directory without other copies of the weights, or itself if it has none.

    It serves engines that choose files on their own: vLLM prefers `consolidated.safetensors` to
    `model.safetensors`, and SGLang loads everything that ends in .safetensors. The other directory
    has links. Raises ValueError if the index is damaged.
    """
    counted = {file.name for file in weight_files(model)}
    if not counted:  # an id of the hub, or what engines refuse themselves
        yield model
        return
    kept = [one for one in model.iterdir() if one.name in counted or not _holds_weights(one)]
    if WHOLE in counted:
        kept = [one for one in kept if one.name != INDEX]
    if len(kept) == len(list(model.iterdir())):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as folder:
        for one in kept:
            Path(folder, one.name).symlink_to(one.resolve())
        yield Path(folder)


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or (
        file.name.startswith("consolidated") and file.suffix == ".json"
    )
