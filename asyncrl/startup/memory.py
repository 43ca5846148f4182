"""Estimates the trainer's memory, and checks that its device has it.

memory     trainer: 61 GiB of GPU 1 (80 GiB): moments 22 GiB, weights 17 GiB, gradients 12 GiB, ...
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.gpus import torch_build
from asyncrl.launch.placement import GpuPlan
from asyncrl.monitoring.terminal.formatting import size
from asyncrl.tasks.data import hub
from asyncrl.tasks.model_files import parameters
from asyncrl.tasks.model_tokenizer import readable_settings
from asyncrl.trainer.base.algorithm_registry import entry_of
from asyncrl.trainer.base.config import BFLOAT16_CAPABILITY
from asyncrl.trainer.base.rank_network import is_loopback
from asyncrl.trainer.model import memory_estimate
from asyncrl.trainer.model.memory_estimate import FULL, ModelShape, Samples, StepMemory

_MIB = 2**20


class Device(NamedTuple):
    """The device on which the trainer computes."""

    name: str
    bytes: int | None
    on_gpu: bool
    ranks: int = 1

    @property
    def room(self) -> int | None:
        """Return the bytes that a rank's step may need by estimate; None if unknown."""
        if self.bytes is None:
            return None
        return int(FULL * self.bytes) if self.on_gpu else self.bytes // self.ranks


def device_of(config: RunConfig, gpus: GpuPlan | None) -> Device | None:
    """Return the trainer's device; None if another launcher places it."""
    if config.launcher.kind != "local":
        return None
    if gpus is None or not gpus.trainer:
        return Device(
            "this machine", memory_estimate.host_bytes(), on_gpu=False, ranks=config.trainer.ranks
        )
    mine = gpus.trainer[0]
    size = None if mine.memory_mib is None else mine.memory_mib * _MIB
    return Device(f"GPU {mine.name}", size, on_gpu=True)


def device_here(config: RunConfig) -> Device:
    """Return the device of a trainer in this process."""
    import torch

    from asyncrl.trainer.scoring import resolve_device

    device = resolve_device(config.trainer.device)
    if device.type != "cuda":
        # With a network, ranks may be on several machines, and how many are here is not known.
        here = config.trainer.ranks if is_loopback(config.trainer.rank_network) else 1
        return Device("this machine", memory_estimate.host_bytes(), on_gpu=False, ranks=here)
    found = torch.cuda.get_device_properties(device)
    return Device(f"its GPU ({found.name})", found.total_memory, on_gpu=True)


def local_model(path: str) -> Path | None:
    """Return a model's folder by path or hub id; None if it is not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    return hub.cached_model(path) if hub.is_id(path) else None


def shape_of(
    config: RunConfig, model: Path, count: int | None, sizes: Mapping[str, int] | None = None
) -> ModelShape | None:
    """Return the shape of a model with its critic; None if it is not a known transformer.

    `count` is the number of parameters. `sizes`, from `check_files`, hold numbers of config.json by
    their usual names, for families that use other names (GPT-2, OPT).
    """
    shape = ModelShape.of(readable_settings(model / "config.json"), count)
    if shape is None and sizes:
        usual = {"intermediate_size": 4 * sizes.get("hidden_size", 0), **sizes}
        shape = ModelShape.of(usual, count)
    if shape is None:
        return None
    return replace(shape, critic=critic_parameters(config, shape.parameters))


def memory_of(config: RunConfig, shape: ModelShape, *, on_gpu: bool) -> StepMemory:
    """Estimate the trainer's memory.

    With `trainer.dtype: auto`, a GPU is assumed to have compute capability 8.0 or above.
    """
    trainer = config.trainer.for_device(BFLOAT16_CAPABILITY if on_gpu else None)
    wide = config.engine.dtype == "float32" or (config.engine.dtype == "auto" and not on_gpu)
    return memory_estimate.step_memory(
        shape, trainer, samples_of(config), on_gpu=on_gpu, engine_bytes=4 if wide else 2
    )


def samples_of(config: RunConfig) -> Samples:
    """Return the largest samples that a run may have."""
    return Samples(config.engine.max_model_len, config.scheduler.group_size)


def critic_parameters(config: RunConfig, policy: int) -> int:
    """Return the number of the value model's parameters, in addition to the policy's."""
    critic = config.trainer.critic
    if not entry_of(config.trainer.algorithm).critic or critic.shared_trunk:
        return 0
    return policy if critic.model is None else parameters(Path(critic.model)) or policy


def memory_comment(config: RunConfig) -> str:
    """Return a YAML comment with a step's memory, on a GPU unless known otherwise."""
    path = config.model.path
    here = local_model(path)
    shape = None if here is None else shape_of(config, here, parameters(here))
    if shape is None:
        return f"# memory: not known, because {path} is not on this machine"
    on_gpu = config.trainer.device != "cpu" and torch_build().cuda is not None
    text = memory_text(memory_of(config, shape, on_gpu=on_gpu), None)
    ranks = config.trainer.ranks
    return f"# memory: {text}{f'; each of {ranks} ranks' if ranks > 1 else ''}"


def memory_text(needs: StepMemory, device: Device | None) -> str:
    """Describe the memory of a step: how much, where, and of which kinds."""
    kinds = ", ".join(f"{name} {size(count)}" for name, count in needs.kinds())
    where = "" if device is None else f" of {device.name}"
    if device is not None and device.bytes is not None:
        where += f" ({size(device.bytes)})"
    there = (("moments", needs.host_moments), ("copy", needs.host_copy))
    listed = ", ".join(f"{name} {size(count)}" for name, count in there if count)
    moved = f"; host: {listed}" if listed else ""
    return f"trainer: about {size(needs.device)}{where}: {kinds}{moved}"


def refuse_too_large(config: RunConfig, shape: ModelShape, device: Device) -> None:
    """Refuse a step for which this device has too little memory.

    A GPU must have `FULL` of the estimate; a host must have what is needed even if the estimate
    errs. Raises UserError with the settings that would help.
    """
    needs = memory_of(config, shape, on_gpu=device.on_gpu)
    room, least = device.room, needs.device if device.on_gpu else needs.least
    if device.bytes is None or room is None or least <= room:
        return
    trainer = config.trainer.for_device(BFLOAT16_CAPABILITY if device.on_gpu else None)
    settings, with_them = memory_estimate.remedies(
        shape, trainer, samples_of(config), room, on_gpu=device.on_gpu
    )
    if with_them <= room:
        what = f"Set {' and '.join(settings)}: then it is about {size(with_them)}"
    else:
        tried = f", and {size(with_them)} even with {', '.join(settings)}" if settings else ""
        fewer = ", or fewer trainer.ranks on this machine" if config.trainer.ranks > 1 else ""
        what = f"It needs a larger device or a smaller model{'' if device.on_gpu else fewer}{tried}"
    each = f" in each of {config.trainer.ranks} ranks" if config.trainer.ranks > 1 else ""
    needed = f"about {size(least)}" if device.on_gpu else f"at least {size(least)}"
    usable = f", of which {FULL:.0%} can be planned with" if device.on_gpu else ""
    raise UserError(
        f"a training step needs {needed}{each}, and {device.name} has "
        f"{size(device.bytes)}{usable}: {memory_text(needs, None)}. {what}"
    )
