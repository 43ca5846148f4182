"""What of a checkpoint with an adapter is exported: the adapter itself, or the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.index import Index, read_index
from asyncrl.trainer.checkpoint.format.manifest import Manifest
from asyncrl.trainer.checkpoint.format.tensors import Box, load_tensors
from asyncrl.trainer.lora.files import ADAPTER, CONFIG
from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.adapter import Pair, merge, merged, pairs_of
from asyncrl.wire.weights.fingerprint import TensorSums, collect, sums_of
from asyncrl.wire.weights.pretrained import load_causal_lm

_POLICY = "weights/policy/"


def has_adapter(checkpoint: Path) -> bool:
    """Whether the weights of a checkpoint are an adapter's."""
    return (checkpoint / ADAPTER / CONFIG).is_file()


def settings_of_adapter(checkpoint: Path) -> dict[str, Any]:
    """The contents of adapter_config.json. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads((checkpoint / ADAPTER / CONFIG).read_bytes())
    return found


def adapter_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """A and B of each layer, by their names in the model. Raises CheckpointError and OSError."""
    index: Index = read_index(checkpoint)
    found: dict[str, Tensor] = {}
    for name, saved in index.tensors.items():
        if name.startswith(_POLICY):
            tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
            load_tensors(checkpoint, index, {name: Box.of(tensor)})
            found[name.removeprefix(_POLICY)] = tensor
    return found


def merged_model(
    checkpoint: Path, manifest: Manifest, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The model that the adapter is of, with the adapter merged into it.

    Args:
        checkpoint: with an adapter.
        manifest: of it.
        dtype: of the weights; None: as the trainer held the model.

    Raises:
        CheckpointError: the model is not where it was, or is another one; or the weights are not
            those that the run's engines were given.
        OSError, ValueError, KeyError: the checkpoint's files cannot be read.
    """
    settings = settings_of_adapter(checkpoint)
    scaling = settings["lora_alpha"] / settings["r"]
    try:
        pairs = pairs_of(adapter_tensors(checkpoint).items())
    except WeightsReadError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    path = settings["base_model_name_or_path"]
    held = torch.bfloat16 if manifest.settings.get("dtype") == "bfloat16" else torch.float32
    try:
        model = load_causal_lm(path, held)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the model {path}, which the adapter of {checkpoint} is of, cannot be loaded: {error}"
        ) from error
    own = model.state_dict(keep_vars=True)
    missing = sorted(pairs.keys() - own.keys())
    if missing:
        raise CheckpointError(f"{path} has no {missing[:3]}, which {checkpoint} has adapters of")
    _compare(checkpoint, manifest, own, pairs, scaling)
    if dtype is not None:
        model = model.to(dtype)
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in pairs:
            merge(parameter.detach().clone(), pairs[name], scaling, parameter.detach())
    return model


def _compare(
    checkpoint: Path,
    manifest: Manifest,
    own: dict[str, Tensor],
    pairs: dict[str, Pair],
    scaling: float,
) -> None:
    """Refuse another model than the one that was trained, where the engines' digest is known."""
    published = manifest.published or None
    if published is None:
        return
    kind = getattr(torch, published.dtype)
    known: dict[int, TensorSums] = {}
    named: list[tuple[str, TensorSums]] = []
    for name, tensor in own.items():
        if name in pairs:
            named.append((name, sums_of(merged(tensor, pairs[name], scaling, kind))))
            continue
        if id(tensor) not in known:
            known[id(tensor)] = sums_of(tensor, kind)
        named.append((name, known[id(tensor)]))
    whole = collect(named).whole
    if whole != published.digest:
        raise CheckpointError(
            f"the adapter of {checkpoint}, merged into its model, is not what the run's engines "
            f"decoded with at step {manifest.policy_version}: the digest is {whole}, not "
            f"{published.digest}. The model was changed since"
        )
