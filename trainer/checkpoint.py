"""Checkpoints: written beside, renamed into place, so that a directory is whole or absent.

```
checkpoints/step-000012/
  model/            a Hugging Face directory: weights, configuration, tokenizer files
  trainer.pt        optimizer state and random states (torch, loaded with weights_only=True)
  state.json        format, policy_version (= the data cursor: steps consumed), settings; last
```
"""

from __future__ import annotations

import hashlib
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
"""Grows when an older reader could not read what is written."""

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
"""Settings that may differ between two halves of a run: they change speed, memory and rounding, or
are what people turn when a run goes wrong."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint is made of."""

    model: PreTrainedModel
    optimizer: dict[str, Any]
    model_path: str
    """Where the run's model came from; its tokenizer files are copied."""
    policy_version: int
    setting: dict[str, Any]
    """Every setting that shapes the run, JSON types."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `read` gives back; the model and random states are already in place."""

    optimizer: dict[str, Any]
    policy_version: int


def write(directory: Path, contents: Contents) -> None:
    """Write a checkpoint to `directory` (replacing one of that name), atomically.

    Raises:
        CheckpointError: the disk refused; what was there before is untouched.
    """
    beside = directory.with_name(f".{directory.name}.{os.getpid()}.writing")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        _fill(beside, contents)
        for path in [*beside.rglob("*"), beside]:
            _sync(path)
        if directory.exists():
            old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
            directory.rename(old)
            beside.rename(directory)
            shutil.rmtree(old)
        else:
            beside.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {directory}: {error}") from error


def read(directory: Path, model: PreTrainedModel, setting: dict[str, Any]) -> Loaded:
    """Load weights into `model`, set the random states, return the rest.

    Raises:
        CheckpointError: incomplete, another format, another model, or other settings.
    """
    state = read_state(directory)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} has checkpoint format {state.get('format')}, this version reads {FORMAT}"
        )
    _check_setting(directory, state["setting"], setting)
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
        "setting": contents.setting,
        "setting_sha256": _digest(contents.setting),
    }
    (directory / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


def _copy_tokenizer(model_path: str, target: Path) -> None:
    """Everything beside the weights that the model's directory has and the new one lacks."""
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


def _check_setting(directory: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    # Through JSON, so that tuples and lists compare equal.
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
    """Through transformers, which undoes whatever renaming `save_pretrained` did."""
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


def _digest(setting: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
