"""PEFT directories: the tensors of an adapter, by the names that they have in a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.lora.files import PREFIX, TENSORS, why_not_started_from, write_settings


def read_adapter(directory: Path, config: LoraConfig) -> dict[str, Tensor]:
    """The tensors of an adapter, by the names that peft gives them in a model.

    Raises:
        UnsupportedModelError: it is damaged, or another kind of adapter.
    """
    why = why_not_started_from(directory, config)
    if why is not None:
        raise UnsupportedModelError(f"trainer.lora.adapter: {why}")
    try:
        found = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(
            f"trainer.lora.adapter: {directory / TENSORS} cannot be read: {error}"
        ) from error
    return {_inner(name): tensor for name, tensor in found.items()}


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Write a PEFT directory. Raises OSError, SafetensorError."""
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {_outer(name): one.detach().contiguous() for name, one in tensors.items()}
    save_file(contiguous, directory / TENSORS, metadata={"format": "pt"})
    write_settings(directory, settings)


def converted(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """In another data type; None: as they are."""
    return {n: one if dtype is None else one.to(dtype) for n, one in tensors.items()}


def _outer(name: str) -> str:
    """From the model's name to the file's."""
    return PREFIX + name.replace(".default.weight", ".weight")


def _inner(name: str) -> str:
    inner = name.removeprefix(PREFIX)
    return inner.removesuffix(".weight") + ".default.weight"
