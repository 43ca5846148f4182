"""Exports a checkpoint as a Hugging Face directory, which transformers and vLLM load.

The export is written to a temporary directory, which is then renamed; nothing that exists is
replaced. `asyncrl-export.json`, a manifest like a checkpoint's, names the checkpoint.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from asyncrl.trainer.base.errors import CheckpointError, CheckpointUnwritable
from asyncrl.trainer.checkpoint.export_files import write_record
from asyncrl.trainer.checkpoint.format.files import check_space
from asyncrl.trainer.checkpoint.format.index import WEIGHTS, Index, read_index
from asyncrl.trainer.checkpoint.format.manifest import Manifest, read_manifest, verify_files
from asyncrl.trainer.checkpoint.format.tensors import Box, load_tensors
from asyncrl.trainer.lora.adapter import write_adapter
from asyncrl.trainer.lora.files import ADAPTER, CONFIG
from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.transport.atomic_files import sync
from asyncrl.wire.weights.adapter import Pair, merge, merged, pairs_of
from asyncrl.wire.weights.fingerprint import TensorSums, collect, name_of, sums_of
from asyncrl.wire.weights.pretrained import causal_lm_without_weights, load_causal_lm

_FILE_SIZE = "5GB"
_POLICY = "weights/policy/"


def settings_of_adapter(checkpoint: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads((checkpoint / ADAPTER / CONFIG).read_bytes())
    return found


def adapter_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Read A and B of each layer, by their names in the model. Raises CheckpointError, OSError."""
    index = read_index(checkpoint)
    names = [name for name in index.tensors if name.startswith(_POLICY)]
    return {name.removeprefix(_POLICY): _read(checkpoint, index, name) for name in names}


def merged_model(folder: Path, manifest: Manifest, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load the adapter's base model and merge the adapter into it.

    Raises CheckpointError if the base model is missing or has changed, or the result is not the
    weights that the engines received; OSError, ValueError or KeyError for unreadable files.
    """
    settings = settings_of_adapter(folder)
    scaling = settings["lora_alpha"] / settings["r"]
    try:
        pairs = pairs_of(adapter_tensors(folder).items())
    except WeightsReadError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    path = settings["base_model_name_or_path"]
    held = torch.bfloat16 if manifest.settings.get("dtype") == "bfloat16" else torch.float32
    try:
        model = load_causal_lm(path, held)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the base model {path} of the adapter in {folder} cannot be loaded: {error}"
        ) from error
    own = model.state_dict(keep_vars=True)
    missing = sorted(pairs.keys() - own.keys())
    if missing:
        raise CheckpointError(f"{folder} adapts {missing[:3]}, which {path} lacks")
    _compare(folder, manifest, own, pairs, scaling)
    if dtype is not None:
        model = model.to(dtype)
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in pairs:
            merge(parameter.detach().clone(), pairs[name], scaling, parameter.detach())
    return model


def _compare(
    folder: Path, manifest: Manifest, own: dict[str, Tensor], pairs: dict[str, Pair], scaling: float
) -> None:
    """Refuse another model than the one that was trained, if the engines' digest is known."""
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
            f"the adapter of {folder}, merged into its model, differs from what the run's "
            f"engines used at step {manifest.policy_version}: the digest is {whole}, not "
            f"{published.digest}. The base model has changed since"
        )


def export(checkpoint: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the policy of a checkpoint to `target`, with its adapter merged if it has one.

    Holds the model once in host memory, in `dtype`, by default the trained one. If the checkpoint
    has the digest of the weights that the run's engines received, it is compared. The checkpoint's
    optimizer may be damaged. Raises CheckpointError if the checkpoint is damaged or of another
    format, or `target` exists; CheckpointUnwritable if the disk refused it: nothing of it is left.
    """
    manifest = _verified(checkpoint, target)
    with _made_of(checkpoint, "a model"):
        model = _load(checkpoint, manifest, dtype)
    needed = sum(one.nbytes for one in model.parameters())
    with _written(target, needed) as temporary:
        model.save_pretrained(temporary, max_shard_size=_FILE_SIZE)
        for path in (checkpoint / "model").iterdir():
            if not (temporary / path.name).exists():
                shutil.copyfile(path, temporary / path.name)
        write_record(temporary, checkpoint, manifest, dtype=name_of(next(model.parameters()).dtype))


def export_adapter(checkpoint: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the adapter of a checkpoint to `target`, a PEFT directory. Otherwise like `export`."""
    manifest = _verified(checkpoint, target)
    with _made_of(checkpoint, "an adapter"):
        tensors = adapter_tensors(checkpoint)
        if dtype is not None:
            tensors = {name: one.to(dtype) for name, one in tensors.items()}
        settings = settings_of_adapter(checkpoint)
    with _written(target, sum(one.nbytes for one in tensors.values())) as temporary:
        write_adapter(temporary, tensors, settings)
        kind = name_of(next(iter(tensors.values())).dtype)
        write_record(temporary, checkpoint, manifest, dtype=kind)


def _verified(checkpoint: Path, target: Path) -> Manifest:
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest, only=(*WEIGHTS, ADAPTER))
    if target.exists():
        raise CheckpointError(f"{target} exists and is not replaced; choose another path")
    return manifest


@contextmanager
def _made_of(checkpoint: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot make {what} of {checkpoint}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _written(target: Path, needed: int) -> Iterator[Path]:
    """Yield a folder to fill, which then becomes `target`, private. Raises CheckpointUnwritable."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed)
        temporary.mkdir(mode=0o700)
        yield temporary
        for path in temporary.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
            sync(path)
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointUnwritable(
            f"{target} cannot be written: {why} ({needed} bytes needed)", "io_error"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(checkpoint: Path, manifest: Manifest, dtype: torch.dtype | None) -> PreTrainedModel:
    if (checkpoint / ADAPTER / CONFIG).is_file():
        return merged_model(checkpoint, manifest, dtype)
    index = read_index(checkpoint)
    folder = checkpoint / "model"
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = causal_lm_without_weights(config)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    first_names = _names_by_tensor(model)
    unique = dict.fromkeys(first_names.values())
    expected = {_POLICY + name for name in unique}
    found = {name for name in index.tensors if name.startswith(_POLICY)}
    if expected != found:
        raise CheckpointError(
            f"{checkpoint} has other weights than its model/config.json describes: "
            f"{sorted(expected ^ found)[:3]} are not in both"
        )
    published = manifest.published or None
    digests: dict[str, TensorSums] = {}
    loaded: dict[str, Tensor] = {}
    for name in unique:
        tensor = _read(checkpoint, index, _POLICY + name)
        if published is not None:
            digests[name] = sums_of(tensor, getattr(torch, published.dtype))
        loaded[name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
    if published is not None:
        whole = collect([(name, digests[first]) for name, first in first_names.items()]).whole
        if whole != published.digest:
            raise CheckpointError(
                f"the weights of {checkpoint} are not those that the run's engines received at "
                f"step {manifest.policy_version}: their digest is {whole}, not {published.digest}"
            )
    model.load_state_dict(loaded, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, one in model.state_dict().items() if one.is_meta]
    if left:
        raise CheckpointError(f"{checkpoint} has no weights for {left[:3]}")
    return model


def _read(checkpoint: Path, index: Index, name: str) -> Tensor:
    saved = index.tensors[name]
    tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
    load_tensors(checkpoint, index, {name: Box.of(tensor)})
    return tensor


def _names_by_tensor(model: PreTrainedModel) -> dict[str, str]:
    """Map every name of the state dict to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
