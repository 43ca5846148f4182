"""Refuse an adapter that cannot be trained or served, before any process starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ModelError, UserError
from asyncrl.run.memory import header_of
from trainer.lora.config import LoraConfig
from trainer.lora.files import why_not_started_from


def check_peft(config: RunConfig) -> None:
    """Refuse a run that needs peft where it is not installed. Raises UserError."""
    if config.trainer.lora.enabled and importlib.util.find_spec("peft") is None:
        raise UserError(
            "trainer.lora.rank is above 0, but peft is not installed: pip install 'asyncrl[lora]', "
            "or set trainer.lora.rank to 0"
        )


def with_adapter(config: RunConfig, model: Path) -> RunConfig:
    """The configuration with the adapter's directory as an absolute path.

    Raises:
        UserError: it is no adapter that training can start from, or the model has no such layers.
    """
    _check_targets(config.trainer.lora, model)
    given = config.trainer.lora.adapter
    if given is None:
        return config
    directory = Path(given)
    if not directory.is_dir():
        raise ModelError(
            f"trainer.lora.adapter: there is no directory {given!r} (looked from {Path.cwd()}); "
            "give a PEFT directory, or leave it out to start from the model as it is"
        )
    why = why_not_started_from(directory, config.trainer.lora)
    if why is not None:
        raise UserError(f"trainer.lora.adapter: {why}")
    lora = config.trainer.lora.model_copy(update={"adapter": str(directory.resolve())})
    trainer = config.trainer.model_copy(update={"lora": lora})
    return config.model_copy(update={"trainer": trainer})


def _check_targets(config: LoraConfig, model: Path) -> None:
    """Refuse names of layers that no matrix of the model's files has."""
    files = sorted(model.glob("*.safetensors"))
    if isinstance(config.targets, str) or not files:
        return
    try:
        tensors = [named for file in files for named in header_of(file).items()]
        matrices = {name for name, one in tensors if len(one["shape"]) == 2}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # damaged: the trainer says so when it loads them
    layers = {name.removesuffix(".weight") for name in matrices if name.endswith(".weight")}
    for target in config.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            inner = {name.rpartition(".")[2] for name in layers if name.count(".") > 2}
            raise UserError(
                f"trainer.lora.targets: {target} is no layer of {model}; give some of "
                f"{', '.join(sorted(inner))}, or all-linear"
            )
