"""The optimizer's state and the random states as named tensors and JSON: no pickle.

```
optimizer/
  00001.safetensors, ...   a tensor `state.INDEX.NAME` per entry of the optimizer's state, and
                           `random.cpu`, `random.cuda.0`, ...; about a gibibyte per file
  state.json               everything that is not a tensor, and the files' names
```

A state comes back as it was saved: dtypes, shapes, scalars and tuples included.

    >>> plain = _to_json({"betas": (0.9, 0.999), "lr": 1e-3, "params": [0, 1]}, {}, "group")
    >>> _from_json(plain, {})
    {'betas': (0.9, 0.999), 'lr': 0.001, 'params': [0, 1]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_FILE_BYTES = 1 << 30
"""A file is begun when the last one holds this much: bounds the memory for copies, and lets
several be verified at a time."""


def save_state(folder: Path, optimizer: Mapping[str, Any]) -> None:
    """Write an optimizer's `state_dict` and the present random states.

    Raises:
        OSError, SafetensorError: they could not be written.
        TypeError: the state holds something that is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"random.cuda.{index}"] = state
    plain = _to_json(dict(optimizer), tensors, "state")
    names = []
    folder.mkdir()
    for number, part in enumerate(_parts(tensors), start=1):
        names.append(f"{number:05d}.safetensors")
        # A copy of each, since two entries may not share memory in a file.
        copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in part.items()}
        save_file(copies, folder / names[-1])
    text = json.dumps({"files": names, "optimizer": plain})
    (folder / "state.json").write_text(text, encoding="utf-8")


def load_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_state` wrote.

    Returns:
        The optimizer's `state_dict`, and the random states by name (`cpu`, `cuda.0`, ...).

    Raises:
        OSError, SafetensorError, ValueError, KeyError, TypeError: the files are not as written.
    """
    described = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for name in described["files"]:
        loaded = load_file(folder / Path(name).name)
        # Copies: what was loaded is the file itself, mapped, and the file may be removed.
        tensors.update({key: tensor.clone() for key, tensor in loaded.items()})
    optimizer: dict[str, Any] = _from_json(described["optimizer"], tensors)
    prefix = "random."
    random = {
        name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)
    }
    return optimizer, random


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors, so many at a time that they fill a file."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        part[name] = tensor
        size += tensor.nbytes
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _to_json(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """`value` as JSON; its tensors go to `tensors` under names that begin with `name`.

    JSON has neither tuples nor integer keys, so those are written as `{"tuple": [...]}` and
    `{"dict": [[key, value], ...]}`.
    """
    match value:
        case Tensor():
            tensors[name] = value.detach()
            return {"tensor": name}
        case dict():
            items = [[key, _to_json(one, tensors, f"{name}.{key}")] for key, one in value.items()]
            return {"dict": items}
        case list():
            return [_to_json(one, tensors, f"{name}.{at}") for at, one in enumerate(value)]
        case tuple():
            return {"tuple": _to_json(list(value), tensors, name)}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold")


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": str() as name}:
            return tensors[name]
        case {"dict": list() as items}:
            return {key: _from_json(one, tensors) for key, one in items}
        case {"tuple": list() as items}:
            return tuple(_from_json(one, tensors) for one in items)
        case list():
            return [_from_json(one, tensors) for one in value]
        case dict():
            raise ValueError(f"unknown entry {sorted(value)[:3]}")
    return value
