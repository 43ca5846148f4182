"""Checkpoints: each one is complete or absent.

They are written to a temporary directory, which is then renamed.

```
checkpoints/step-000012/
  model/            a Hugging Face directory: weights, configuration, tokenizer files
  trainer.pt        optimizer state and random states (torch, loaded with weights_only=True)
  state.json        format, policy_version (also the data cursor: steps trained), settings; last
```
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trainer.checkpoint_files import read_state
from trainer.errors import CheckpointError

FORMAT = 1
"""Raised whenever older versions could not read what is written."""

_FREE = frozenset(
    {
        "device",
        "threads",
        "learning_rate",
        "learning_rate_minimum",
        "learning_rate_schedule",
        "schedule_steps",
        "warmup_steps",
        "weight_decay",
        "max_grad_norm",
        "checkpoint_every",
        "keep_checkpoints",
        "micro_batch_tokens",
        "gradient_checkpointing",
    }
)
"""Settings that may change when a run is resumed: those that affect only speed, memory and
rounding, and those that people adjust when a run goes wrong."""
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rest of a checkpoint, after `read` has set the model and the random states."""

    optimizer: dict[str, Any]
    policy_version: int


def write(directory: Path, contents: Contents) -> None:
    """Write a checkpoint to `directory` atomically, replacing one of that name.

    Raises:
        CheckpointError: it could not be written; an existing checkpoint is untouched.
    """
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _fill(temporary, contents)
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        if directory.exists():
            old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
            directory.rename(old)
            temporary.rename(directory)
            shutil.rmtree(old)
        else:
            temporary.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {directory}: {error}") from error


def read(directory: Path, model: PreTrainedModel, settings: dict[str, Any]) -> Loaded:
    """Load weights into `model`, set the random states, return the rest.

    Raises:
        CheckpointError: it is not complete, has another format, is of another model, or was
            written under other settings.
    """
    state = read_state(directory)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} has checkpoint format {state.get('format')}, but this version reads only "
            f"{FORMAT}; resume with the version that wrote it"
        )
    _check_settings(directory, state["setting"], settings)
    try:
        extra = torch.load(directory / "trainer.pt", weights_only=True, map_location="cpu")
        _load_weights(directory, model)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read the checkpoint {directory}: {error}") from error
    # Last: building a model may draw random numbers.
    torch.set_rng_state(extra["random"]["cpu"])
    if torch.cuda.is_available() and extra["random"]["cuda"]:
        torch.cuda.set_rng_state_all(extra["random"]["cuda"])
    return Loaded(extra["optimizer"], int(state["policy_version"]))


def _fill(directory: Path, contents: Contents) -> None:
    contents.model.save_pretrained(directory / "model")
    _copy_tokenizer(contents.model_path, directory / "model")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    extra = {
        "optimizer": contents.optimizer,
        "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
    }
    torch.save(extra, directory / "trainer.pt")
    state = {
        "format": FORMAT,
        "policy_version": contents.policy_version,
        "setting": contents.settings,
    }
    (directory / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


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


def _check_settings(directory: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    # Through JSON, so that tuples and lists compare as equal.
    now = json.loads(json.dumps(now))
    changed = sorted(
        key for key in (then.keys() | now.keys()) - _FREE if then.get(key) != now.get(key)
    )
    if changed:
        listed = ", ".join(f"{key}: {then.get(key)!r} -> {now.get(key)!r}" for key in changed)
        raise CheckpointError(
            f"{directory} was written under other settings ({listed}); resume with those, or "
            f"start a new run from {directory / 'model'}"
        )


def _load_weights(directory: Path, model: PreTrainedModel) -> None:
    """Load by transformers, which undoes the renaming of `save_pretrained`."""
    own = model.state_dict()
    dtype = next(model.parameters()).dtype
    loaded = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=dtype).state_dict()
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
