"""Learners whose weights are in parts on the ranks, each in a process of its own.

    python -m sharded_learner FOLDER TIED UNTIED EXPERTS

As `ranked_learner`: it loads torch once and forks. Rank 0 of each world writes what the learner
came to into FOLDER, for `test_sharding`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from ranked_learner import DEALS, fork_ranks, groups_of, load_libraries, moments
from safetensors.torch import save_file

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import RankLost
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.ranks import World
from asyncrl.trainer.sharding.lockstep import NextAction, RankStatus, RankWork
from asyncrl.trainer.sharding.weights import local

EXACT: dict[str, Any] = {"dtype": "float64", "learning_rate": 1e-3, "device": "cpu", "fused": False}
PPO = {"algorithm": "ppo", "kl_coefficient": 0.1, "kl_estimator": "k1"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("tied", {"kl_coefficient": 0.1, "weight_decay": 0.1, "reference_decay": 0.9}),
    "reinforce_plus_plus": (
        "untied", {"algorithm": "reinforce_plus_plus", "gradient_checkpointing": True},
    ),
    "ppo": (
        "untied",
        {**PPO, "ppo_epochs": 2, "minibatches": 2, "gradient_checkpointing": "selective"},
    ),
    "shared trunk": ("tied", {**PPO, "critic": {"shared_trunk": True, "truncated": "bootstrap"}}),
    # torch has no products of experts in float64
    "experts": (
        "experts",
        {"dtype": "float32", "router_loss_coefficient": 0.01, "micro_batch_tokens": 40},
    ),
}  # fmt: skip
RUNS = [(case, "in turn", size) for case in CASES for size in (1, 2)]
RUNS += [("grpo", deal, 4) for deal in DEALS]
RESUMED = [(2, 1, False), (1, 2, True), (2, 2, False), (4, 2, True), (2, 4, True)]
"""Ranks before and after, and whether the weights are in parts after."""
MORE = {"in pairs": lambda group, _size: group // 2}


def learner_of(model: str, settings: dict[str, Any], world: World, *, full: bool = True) -> Learner:
    values = EXACT | settings
    if full and world.size > 1:
        values |= {"sharding": "full", "ranks": world.size}
    config = TrainerConfig.model_validate(values)
    return Learner(config, model, group_size=4, seed=1, world=world)


def train(learner: Learner, step: int, deal: str, groups: int = 5) -> dict[str, Any]:
    """One step, with this rank's groups; the step's metrics."""
    world = learner.world
    for index, group in enumerate(groups_of(step)[:groups]):
        if (DEALS | MORE)[deal](index, world.size) == world.rank:
            learner.add_group(*group)
    while learner.lockstep.agree(RankStatus(RankWork.DONE)) is NextAction.COMPUTE:
        learner.pad()
    return msgspec.to_builtins(learner.step())  # type: ignore[no-any-return]


def held(learner: Learner, kind: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Every weight as a whole, by name."""
    named = {n: learner.weights.whole(one, kind) for n, one in learner.tensors()}
    return {f"weight {name}": one.contiguous().clone() for name, one in named.items()}


def cases(folder: Path, models: dict[str, str], world: World) -> None:
    """Two steps of each case and deal, and the second one again from the checkpoint."""
    for case, deal, size in RUNS:
        if world.size == size:
            model, settings = CASES[case]
            name = f"{case} {deal} {world.size}"
            learner = learner_of(models[model], settings, world)
            metrics = [train(learner, 0, deal)]
            at = path_of(folder / name, 1)
            learner.fingerprint(torch.bfloat16)  # as published: an export compares with it
            learner.save(at)
            world.barrier("the checkpoint")
            metrics.append(train(learner, 1, deal))
            tensors = held(learner)
            digest = learner.fingerprint(torch.bfloat16).whole
            if world.leads:
                save_file(tensors | moments(at), folder / f"{name}.safetensors")
                said = {"metrics": metrics, "empty": learner.lockstep.empty, "digest": digest}
                (folder / f"{name}.json").write_text(json.dumps(said))


def resumed(folder: Path, models: dict[str, str], world: World) -> None:
    """A step after checkpoints of "grpo", with parts and without."""
    for before, after, full in RESUMED:
        if world.size == after:
            learner = learner_of(models["tied"], CASES["grpo"][1], world, full=full)
            learner.restore(path_of(folder / f"grpo in turn {before}", 1))
            train(learner, 1, "at random")
            tensors = held(learner)
            if world.leads:
                save_file(tensors, folder / f"{before} to {after} {full}.safetensors")


def bits(folder: Path, models: dict[str, str], world: World) -> None:
    """A step of one micro-batch a rank, with parts and without."""
    for dtype in ("float32", "bfloat16"):
        for full in (True, False):
            settings = {"dtype": dtype, "max_grad_norm": 0.05}
            model = "tied" if dtype == "bfloat16" else "untied"
            learner = learner_of(models[model], settings, world, full=full)
            for step in range(2):
                # Group 1 has no signal: of the first three, each rank computes one.
                train(learner, step, "in turn" if step else "in pairs", 3)
            tensors = held(learner, torch.float32)
            if world.leads:
                save_file(tensors, folder / f"{dtype} {full}.safetensors")


def lost(folder: Path, models: dict[str, str], world: World) -> None:
    """The last rank ends in a micro-batch; the other says what it waited for."""
    learner = learner_of(models["tied"], {}, world)
    world.barrier("the middle of the test")
    if world.rank == world.size - 1:
        assert learner.lockstep.agree(RankStatus(RankWork.NOTHING)) is NextAction.COMPUTE
        os._exit(0)
    try:
        train(learner, 0, "in turn")
    except RankLost as error:
        (folder / f"lost {world.rank}").write_text(str(error))


def live(folder: Path, models: dict[str, str], world: World) -> None:
    """What a rank holds in the middle of its second step, in bytes."""
    for full in (True, False):
        gc.collect()
        before = _live()
        settings = {"dtype": "float32", "async_checkpoints": False}  # float32 as the file: mapped
        learner = learner_of(models["untied"], settings, world, full=full)
        mapped = f"{models['untied']}/model.safetensors" in Path("/proc/self/maps").read_text()
        train(learner, 0, "in turn", 2)
        for index, group in enumerate(groups_of(1)[2:4]):
            if index == world.rank:
                learner.add_group(*group)
        gc.collect()
        held = _live() - before
        sizes = [(math.prod(one.shape) * one.itemsize, one.ndim) for _, one in learner.tensors()]
        matrices = sum(size for size, ndim in sizes if ndim > 1)
        said = {"held": held, "mapped": mapped, "matrices": matrices}
        said["vectors"] = sum(size for size, ndim in sizes if ndim < 2)
        (folder / f"live {full} {world.rank}.json").write_text(json.dumps(said))
        world.barrier("the middle of the step")
        del learner


def _live() -> int:
    """Bytes of the memory of all tensors that Python can reach."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            for tensor in (one, one.grad if one.is_leaf else None):
                if tensor is not None:
                    storage = local(tensor).untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


JOBS = {live: (2,), cases: (1, 2, 4), resumed: (1, 2, 4), bits: (2,), lost: (2,)}


def main(folder: Path, models: dict[str, str], only: Sequence[str] = ()) -> int:
    """Run all jobs; how many ranks failed."""
    torch.set_num_threads(1)
    failed = 0
    for job, sizes in JOBS.items():
        if not only or job.__name__ in only:
            failed += fork_ranks(
                lambda world, job=job: job(folder, models, world), folder, job.__name__, sizes
            )
    return failed


if __name__ == "__main__":
    warnings.simplefilter("error")
    load_libraries(*sys.argv[2:5])
    names = dict(zip(("tied", "untied", "experts"), sys.argv[2:5], strict=True))
    sys.exit(main(Path(sys.argv[1]), names, sys.argv[5:]))
