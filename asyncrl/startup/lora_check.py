"""Refuses an adapter that cannot be trained or served, before any process starts."""

import importlib.util
import re
from pathlib import Path

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ModelError, UserError
from asyncrl.launch.gpus import torch_build
from asyncrl.startup.model_check import why_not_whole
from asyncrl.tasks.model_files import header_of, weight_files
from asyncrl.trainer.base.lora_config import FINER_ENGINES, LoraConfig
from asyncrl.trainer.lora.files import PREFIX, TENSORS, why_not_started_from

MAX_SERVED_RANK = 512
"""Largest rank of an adapter that vLLM 0.32.0 can serve."""
_OUTER_DOTS = 2
"""Maximum of dots in names of embeddings and heads; names of layers in blocks have more."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Matches tensors that the loaded model holds as parts of larger ones, not as layers."""
_PARTS = {"A.weight": 1, "B.weight": 0}
"""The side of a tensor that it shares with the adapted matrix, by the end of its name."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)


def check_peft(config: RunConfig) -> None:
    """Refuse a run that needs peft if it is not installed. Raises UserError."""
    if config.trainer.lora.enabled and importlib.util.find_spec("peft") is None:
        raise UserError(
            "trainer.lora.rank is above 0, but peft is not installed: pip install 'asyncrl[lora]', "
            "or set trainer.lora.rank to 0"
        )


def check_serving(config: RunConfig) -> None:
    """Refuse an adapter that engines cannot serve as it is trained. Raises UserError."""
    lora = config.trainer.lora
    on_cpu = config.engine.device == "cpu" or (
        config.launcher.kind == "local" and torch_build().cuda is None
    )
    finer = config.engine.weights_dtype(on_cpu=on_cpu) == "float32"
    if lora.enabled and config.trainer.dtype == "bfloat16" and finer:
        raise UserError(FINER_ENGINES)
    if lora.serve != "adapter":
        return
    others = sorted({one.kind for one in config.engines} - {"vllm"})
    if others:
        raise UserError(
            f"trainer.lora.serve: adapter is for vLLM alone, and engine.kind is "
            f"{' and '.join(others)}; use trainer.lora.serve: merged, which every engine serves"
        )
    if lora.rank > MAX_SERVED_RANK:
        raise UserError(
            f"trainer.lora.serve: adapter, with trainer.lora.rank: {lora.rank}: vLLM serves "
            f"adapters of rank {MAX_SERVED_RANK} at most; use trainer.lora.serve: merged"
        )
    if config.engine.vllm.tensor_parallel_size > 1:
        raise UserError(
            "trainer.lora.serve: adapter does not work with engine.vllm.tensor_parallel_size above "
            "1, where each rank would have to prove its part of the adapter; use "
            "trainer.lora.serve: merged"
        )


def with_adapter(config: RunConfig, model: Path) -> RunConfig:
    """Return the configuration with the adapter's absolute path. Raises UserError if unfit."""
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
    why = why_not_started_from(directory, config.trainer.lora) or _why_not_of(directory, model)
    if why is not None:
        raise UserError(f"trainer.lora.adapter: {why}")
    lora = config.trainer.lora.model_copy(update={"adapter": str(directory.resolve())})
    return config.with_values("trainer", lora=lora)


def _check_targets(config: LoraConfig, model: Path) -> None:
    if isinstance(config.targets, str):
        return
    try:
        shapes = _shapes(weight_files(model))
    except _DAMAGED:
        return  # the trainer says so when it loads them
    layers = {
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not _EXPERT.search(name)
    }
    inner = {name for name in layers if name.count(".") > _OUTER_DOTS}
    for target in config.targets if layers else ():
        if not any(f".{name}".endswith(f".{target}") for name in inner):
            outer = any(f".{name}".endswith(f".{target}") for name in layers)
            what = f"no layer of {model}"
            if outer:
                what = f"no layer in a block of {model}, and only those can have an adapter"
            known = sorted({name.rpartition(".")[2] for name in inner})
            raise UserError(
                f"trainer.lora.targets: {target} is {what}; give some of {', '.join(known)}, or "
                "all-linear"
            )


def _why_not_of(adapter: Path, model: Path) -> str | None:
    """Say why an adapter does not fit this model, from the shapes in their files, or None."""
    file = adapter / TENSORS
    if (why := why_not_whole(file)) is not None:
        return f"{file} {why}; save or export the adapter again"
    given = _shapes([file])
    try:
        own = _shapes(weight_files(model))
    except _DAMAGED:
        return None  # the trainer says so when it loads them
    for name, shape in given.items():
        layer, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        matrix = own.get(f"{layer}.weight")
        if part not in _PARTS or matrix is None or len(shape) != 2:
            continue
        width = shape[_PARTS[part]]
        if width not in matrix:
            return (
                f"{adapter} is of another model than {model}: its {name.removeprefix(PREFIX)} is "
                f"for a matrix with a side of {width:,}, and {layer} has {matrix[0]:,} x "
                f"{matrix[-1]:,}"
            )
    return None


def _shapes(files: list[Path]) -> dict[str, list[int]]:
    """Return tensor shapes of safetensors files by name. Raises some of `_DAMAGED`."""
    tensors = [named for file in files for named in header_of(file).items()]
    return {name: list(one["shape"]) for name, one in tensors}
