"""Checkpoints: each one is complete or absent.

They are written to a temporary directory, which is then renamed. `trainer.checkpoint_manifest` has
the manifest, `trainer.checkpoint_files` finds them.

```
checkpoints/step-000012/
  model/            a Hugging Face directory: weights, configuration, tokenizer files
  optimizer/        optimizer state and random states: safetensors and JSON
  steps.jsonl       what the trainer knows of the steps since the checkpoint before
  manifest.json     format, policy version (also the data cursor: steps trained), settings, and
                    size and digest of every other file; last
```

Nothing in a checkpoint is a pickle, so reading one runs no code of whoever wrote it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trainer.checkpoint_files import STEPS, remove_remains, set_aside, verified
from trainer.checkpoint_manifest import check_settings, write_manifest
from trainer.disk import check_space, unwritable
from trainer.errors import CheckpointError, CheckpointUnwritable
from trainer.fence import UNFENCED, Fence
from trainer.optimizer_state import load_state, save_state
from wire.atomic_files import sync
from wire.records import TrainedStep

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5")


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written to a checkpoint."""

    model: PreTrainedModel
    optimizer: dict[str, Any]
    model_path: str
    """Where the run's model came from; its tokenizer files are copied from there."""
    policy_version: int
    settings: dict[str, Any]
    """Every setting that shapes the run, as JSON types."""
    initial_weights: str
    """Digest of the weights that the run started from; empty if it is not known."""
    steps: Sequence[TrainedStep] = ()
    """The steps since the checkpoint before."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rest of a checkpoint, after `read` has set the model and the random states."""

    optimizer: dict[str, Any]
    policy_version: int
    initial_weights: str
    """As in `Contents`."""


def write(
    directory: Path,
    contents: Contents,
    given_up: threading.Event | None = None,
    fence: Fence = UNFENCED,
) -> None:
    """Write a checkpoint to `directory` atomically.

    One of that name, and newer ones, are moved to `set-aside/`: they belong to another course of
    the run.

    Args:
        directory: its name.
        contents: must not change until this returns, unless it is given up.
        given_up: may be set by another thread, which does not wait any longer: what was written
            may be inconsistent and is removed.
        fence: keeps a trainer that was replaced from writing.

    Raises:
        Superseded: this is no longer the run's trainer; nothing of it is left.
        CheckpointUnwritable: the disk does not take it, or it was given up; nothing of it is left,
            and no other is removed.
    """
    # Two containers may have trainers with one process id.
    word = f"{os.getpid()}-{os.urandom(4).hex()}"
    temporary = directory.with_name(f".{directory.name}.{word}.writing")
    needed = _bytes_of(contents)
    fence.check()
    with unwritable(directory, needed):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            remove_remains(directory.parent)
            check_space(directory.parent, needed)
            temporary.mkdir()
            _fill(temporary, contents)
            for path in [*temporary.rglob("*"), temporary]:
                sync(path)
            if given_up is not None and given_up.is_set():
                raise CheckpointUnwritable(f"{directory} was given up", "hanging")
            fence.check()
            if directory.exists():
                set_aside(directory.parent, newer_than=contents.policy_version - 1)
            temporary.rename(directory)
            sync(directory.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def read(directory: Path, model: PreTrainedModel, settings: dict[str, Any]) -> Loaded:
    """Load weights into `model`, set the random states, return the rest.

    Raises:
        CheckpointError: it is not whole, has another format, is of another model, or was written
            under other settings.
    """
    manifest = verified(directory)
    check_settings(directory, manifest, settings)
    try:
        optimizer, random = load_state(directory / "optimizer")
        _load_weights(directory, model)
        # Last: building a model may draw random numbers.
        torch.set_rng_state(random.pop("cpu"))
        if torch.cuda.is_available() and random:
            torch.cuda.set_rng_state_all([random[f"cuda.{at}"] for at in range(len(random))])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}"
        ) from error
    return Loaded(optimizer, manifest.policy_version, manifest.initial_weights or "")


def _fill(directory: Path, contents: Contents) -> None:
    contents.model.save_pretrained(directory / "model")
    _copy_tokenizer(contents.model_path, directory / "model")
    save_state(directory / "optimizer", contents.optimizer)
    lines = [msgspec.json.encode(step) + b"\n" for step in contents.steps]
    (directory / STEPS).write_bytes(b"".join(lines))
    write_manifest(
        directory,
        policy_version=contents.policy_version,
        settings=contents.settings,
        initial_weights=contents.initial_weights,
    )


def _bytes_of(contents: Contents) -> int:
    """Size of the tensors of a checkpoint; its other files are small."""
    weights = {tensor.data_ptr(): tensor for tensor in contents.model.state_dict().values()}
    optimizer = [
        value
        for state in contents.optimizer.get("state", {}).values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in [*weights.values(), *optimizer])


def _copy_tokenizer(model_path: str, target: Path) -> None:
    """Copy the model's other files (tokenizer, chat template) that `target` lacks."""
    source = Path(model_path)
    if not source.is_dir():
        AutoTokenizer.from_pretrained(model_path).save_pretrained(target)
        return
    for path in source.iterdir():
        if (
            path.is_file()
            and not path.name.endswith(_WEIGHTS)
            and not (target / path.name).exists()
        ):
            shutil.copyfile(path, target / path.name)


def _load_weights(directory: Path, model: PreTrainedModel) -> None:
    """Load by transformers, which undoes the renaming of `save_pretrained`."""
    own = model.state_dict()
    dtype = next(model.parameters()).dtype
    loaded = AutoModelForCausalLM.from_pretrained(
        directory / "model", dtype=dtype, use_safetensors=True, trust_remote_code=False
    ).state_dict()
    wrong = [
        name
        for name in own.keys() | loaded.keys()
        if name not in own or name not in loaded or own[name].shape != loaded[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{directory} is of another model: {sorted(wrong)[:3]} differ in name or shape"
        )
    with torch.no_grad():
        for name, tensor in loaded.items():
            own[name].copy_(tensor)
