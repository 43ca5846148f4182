"""Chooses the devices of a run, from its configuration and this machine's GPUs."""

import os
from typing import Literal

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.gpus import TorchBuild, find_gpus, torch_build
from asyncrl.launch.placement import VISIBLE, GpuNeeds, GpuPlan, plan_gpus, select_gpus


def place(config: RunConfig) -> GpuPlan | None:
    """Choose the GPUs of each process; return None if the machine does not have any.

    With `launcher.gpus: []` the machine is not queried, and processes do not see GPUs. Raises
    UserError if there are too few GPUs, or if the configuration names one that does not exist.
    """
    build, visible, wanted = torch_build(), os.environ.get(VISIBLE), config.launcher.gpus
    found = find_gpus() if wanted != () else []
    if not found and wanted is None:
        _refuse_cuda(config, build, "this machine has none")
        return None
    usable = select_gpus(found, visible, wanted) if wanted != () else []
    if not usable or build.cuda is None:
        _refuse_cuda(config, build, f"{VISIBLE} and launcher.gpus leave none")
        usable = []
    return plan_gpus(usable, needs_of(config, any_gpu=bool(usable)), renumbers=visible is None)


def needs_of(config: RunConfig, *, any_gpu: bool) -> GpuNeeds:
    """Return the GPUs that a run wants; `auto` wants one if there is any. Raises UserError."""
    fleet = config.engines
    engine = next((one for one in fleet if one.kind != "torch"), fleet[0])
    if any_gpu and len({one.gpus for one in fleet}) > 1:
        sizes = ", ".join(f"{one.kind}: {one.gpus}" for one in fleet)
        raise UserError(
            f"engine.kinds: all generators of a run take the same number of GPUs, and these take "
            f"{sizes}; set tensor_parallel_size of their engines alike (torch takes 1)"
        )
    return GpuNeeds(
        generators=config.launcher.generators,
        per_generator=engine.gpus if any_gpu and engine.device != "cpu" else 0,
        trainer=config.trainer.ranks if any_gpu and config.trainer.device != "cpu" else 0,
        colocate=config.launcher.colocate,
        engine="vllm" if engine.kind == "torch" else engine.kind,
    )


def engine_device(plan: GpuPlan | None) -> Literal["cpu", "cuda"] | None:
    """Return the generators' device; None without a plan, so that torch decides."""
    if plan is None:
        return None
    return "cuda" if plan.generators[0] else "cpu"


def _refuse_cuda(config: RunConfig, build: TorchBuild, why: str) -> None:
    for section in ("engine", "trainer"):
        if getattr(config, section).device == "cuda":
            because = f"torch {build.version} is built for the CPU" if build.cuda is None else why
            raise UserError(
                f"{section}.device: cuda needs a GPU, and {because}; use {section}.device: auto, "
                "or a torch with CUDA on a machine with a GPU"
            )
