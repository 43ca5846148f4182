"""Learners of several ranks, each in a process of its own, connected by gloo.

    python -m ranked_learner JOB FOLDER MODEL

It loads torch once and forks the ranks. Rank 0 of each world writes what the learner came to into
FOLDER, for `test_ranks`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import RankLost, TrainerError
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.checkpoint.format.index import read_index
from asyncrl.trainer.checkpoint.format.tensors import Box, load_tensors
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.ranks import World, shards
from asyncrl.trainer.ranks.world import join
from benchmarks.machines.namespaces import Machine, machines, why_not

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coefficient": 0.1, "weight_decay": 0.1},
    "reinforce_plus_plus": {"max_grad_norm": 0.05},
    "lora": {"algorithm": "grpo", "lora": {"rank": 2}, "kl_coefficient": 0.1},
    "ppo": {
        "ppo_epochs": 2,
        "minibatches": 2,
        "kl_coefficient": 0.1,
        "kl_estimator": "k1",
        "critic": {"passes": 3, "minibatches": 2},
    },
}
GROUPS, STEPS = 5, 2
DEALS: dict[str, Callable[[int, int], int]] = {
    "in turn": lambda group, size: group % size,
    "all to the last": lambda _group, size: size - 1,
    "at random": lambda group, size: (7 * group + 3) // 2 % size,
}
RUNS = [(case, "in turn", 1) for case in CASES]
RUNS += [(case, deal, 2) for case in CASES for deal in DEALS]
RUNS += [("grpo", deal, 4) for deal in DEALS]
RUNS += [(case, "at random", 4) for case in CASES if case != "grpo"]
RESUMED = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
"""Ranks before and after."""


def groups_of(step: int) -> list[tuple[list[Trajectory], np.ndarray]]:
    """The groups of a step; one of them has no signal."""
    rng = np.random.default_rng(step)
    found = []
    for index in range(GROUPS):
        rewards = np.ones(4) if index == 1 else rng.normal(size=4)
        found.append((_group(GROUPS * step + index, rng, step), rewards.astype(np.float32)))
    return found


def _group(group: int, rng: np.random.Generator, version: int) -> list[Trajectory]:
    prompt = rng.integers(0, 32, rng.integers(1, 6)).astype(np.int32)
    out = []
    for sample in range(4):
        length = int(rng.integers(1, 14))
        tokens = rng.integers(0, 32, length).astype(np.int32)
        behaviour = rng.normal(-3.5, 0.5, length).astype(np.float32)
        provenance = np.full(length, Provenance.SAMPLED, np.uint8)
        if group % 2:  # of several turns
            provenance[1::3] = Provenance.OBSERVED
            behaviour[1::3] = 0
        builder = TrajectoryBuilder(SampleId(group, sample), f"p{group}", prompt)
        builder.append(
            tokens=tokens,
            logprobs=behaviour,
            topk_ids=tokens[:, None],
            topk_logprobs=behaviour[:, None],
            noise_seeds=np.full(length, 17, np.uint64),
            provenance=provenance,
            policy_version=version,
        )
        out.append(builder.finish("stop"))
    return out


def learner_of(case: str, model: str, world: World) -> Learner:
    values = {"dtype": "float64", "learning_rate": 1e-3, "device": "cpu", "algorithm": case}
    config = TrainerConfig.model_validate(values | CASES[case])
    return Learner(config, model, group_size=4, seed=1, world=world)


def train(learner: Learner, step: int, deal: str) -> dict[str, Any]:
    """One step, with this rank's groups in an order of its own; the step's metrics."""
    world = learner.world
    own = [
        group
        for index, group in enumerate(groups_of(step))
        if DEALS[deal](index, world.size) == world.rank
    ]
    order = np.random.default_rng(world.rank + 10 * step).permutation(len(own))
    for place in order if deal == "at random" else range(len(own)):
        learner.add_group(*own[place])
    return msgspec.to_builtins(learner.step())


def steps(folder: Path, model: str, world: World) -> None:
    """Two steps of each case and deal; rank 0 writes weights, moments and metrics."""
    for case, deal, size in RUNS:
        if world.size == size:
            learner = learner_of(case, model, world)
            metrics = [train(learner, 0, deal)]
            at = path_of(folder / f"{case} {deal} {world.size}", 1)
            learner.save(at)
            world.barrier("the checkpoint")
            metrics.append(train(learner, 1, deal))
            if not world.leads:
                continue
            name = folder / f"{case} {deal} {world.size}"
            tensors = {f"weight {name}": t.contiguous() for name, t in learner.tensors()}
            tensors |= moments(at)
            if (critic := learner._models.critic) is not None:
                tensors |= {f"critic {n}": t.detach() for n, t in critic.module.named_parameters()}
            save_file(tensors, f"{name}.safetensors")
            Path(f"{name}.json").write_text(json.dumps(metrics))


def moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The gradients of the first step, by Adam's first moment of it in a checkpoint."""
    index = read_index(checkpoint)
    names = [name for name in index.tensors if name.endswith("/exp_avg")]
    kinds = {name: getattr(torch, index.tensors[name].dtype) for name in names}
    found = {n: torch.empty(index.tensors[n].shape, dtype=kind) for n, kind in kinds.items()}
    load_tensors(checkpoint, index, {name: Box.of(one) for name, one in found.items()})
    return {f"gradient {name}": 10 * one for name, one in found.items()}


def saved(folder: Path, model: str, world: World) -> None:
    """A checkpoint after a step, then another step."""
    learner = learner_of("grpo", model, world)
    train(learner, 0, "in turn")
    learner.save(path_of(folder / f"of {world.size}", 1))
    world.barrier("the end of the test")


def resumed(folder: Path, model: str, world: World) -> None:
    """A step after each checkpoint that `saved` wrote."""
    for before, after in RESUMED:
        if world.size == after:
            learner = learner_of("grpo", model, world)
            learner.restore(path_of(folder / f"of {before}", 1))
            train(learner, 1, "at random")
            if world.leads:
                tensors = {name: one.contiguous() for name, one in learner.tensors()}
                save_file(tensors, folder / f"{before} to {world.size}.safetensors")


def lost(folder: Path, model: str, world: World) -> None:
    """The last rank ends in the middle of a step; the others say what they waited for."""
    learner = learner_of("grpo", model, world)
    (folder / f"listens {world.rank}").write_text(json.dumps(_listening()))
    world.barrier("the middle of the test")
    if world.rank == world.size - 1:
        os._exit(0)
    try:
        train(learner, 0, "in turn")
    except RankLost as error:
        (folder / f"lost {world.rank}").write_text(str(error))


def apart(folder: Path, model: str, world: World) -> None:
    """Ranks on two machines sum what they have, after loopback was refused."""
    del model
    meeting = folder / "meeting-on-loopback"
    try:
        join(meeting, world.rank, world.size, on_gpu=False, join_seconds=300, seconds=300)
    except TrainerError as error:
        (folder / f"refused {world.rank}").write_text(str(error))
    own = torch.empty(1)
    world.reduce_scatter(own, torch.tensor([[1.0 + world.rank], [10.0]]), "a sum")
    said = {"listens": _listening(), "sum": own.tolist(), "host": socket.gethostname()}
    (folder / f"apart {world.rank}").write_text(json.dumps(said))
    world.barrier("the end of the test")


def _listening() -> list[str]:
    """Hexadecimal addresses that this process listens at."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            own.add(str(descriptor.readlink()))
    found = []
    for line in [
        *Path("/proc/self/net/tcp").read_text().splitlines()[1:],
        *Path("/proc/self/net/tcp6").read_text().splitlines()[1:],
    ]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            found.append(fields[1].split(":")[0])
    return found


JOBS = {one.__name__: one for one in (steps, saved, resumed, lost, apart)}


def main(
    job: str, folder: Path, model: str, sizes: Sequence[int], on: Sequence[Machine] = ()
) -> int:
    """Run a job in worlds of these sizes; how many ranks failed. `on` as for `fork_ranks`."""
    torch.set_num_threads(1)
    shards.BUCKET_BYTES = 40_000  # several buckets
    return fork_ranks(lambda world: JOBS[job](folder, model, world), folder, job, sizes, on)


def load_libraries(*models: str) -> None:
    """Load what learners of these models load, once for all ranks that are forked later."""
    import peft
    from transformers import AutoModelForCausalLM

    assert peft
    for model in models:
        AutoModelForCausalLM.from_pretrained(model)


def fork_ranks(
    work: Callable[[World], None],
    folder: Path,
    name: str,
    sizes: Sequence[int],
    on: Sequence[Machine] = (),
) -> int:
    """Do this as each rank of worlds of these sizes; how many ranks failed.

    Args:
        work: to do.
        folder: where they meet.
        name: of the meeting.
        sizes: of the worlds.
        on: if there are any, each rank is on one of these machines.
    """
    children = []
    for size in sizes:
        for rank in range(size):
            child = os.fork()
            if child:
                children.append(child)
                continue
            try:
                if on:
                    on[rank].enter()
                world = join(
                    folder / f"meeting-{name}-{size}",
                    rank,
                    size,
                    on_gpu=False,
                    join_seconds=300,
                    seconds=300,
                    network="192.0.2.0/24" if on else "lo",
                )
                work(world)
                world.close()
            except BaseException:  # noqa: BLE001 - a fork must not return
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    where = Path(sys.argv[2])
    failed = 0
    load_libraries(sys.argv[3])
    for name in sys.argv[1].split(","):
        if name != "apart":
            failed += main(name, where, sys.argv[3], (2,) if name == "lost" else (1, 2, 4))
        elif why_not() is None:
            with machines(["one", "two"], where) as both:
                failed += main(name, where, sys.argv[3], (2,), both)
    sys.exit(failed)
