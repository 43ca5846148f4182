"""Does sharding the weights of a trainer save what it should, and what does it cost?

    python -m benchmarks.ranks [--quick] [--ranks 2] [--dtype float32] [--json FILE]

Contestants: the modes of `trainer.sharding`, which train a random model on the same random tokens,
every rank in a process of its own, connected by gloo over loopback. Compared are the median seconds
of a step, each rank's peak next to the estimate of `trainer.model.memory_estimate` (of a run in
which freed memory goes back to the system at once), and the bytes of the loopback interface next to
the least that `full` needs: weights twice in a micro-batch, and gradients once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from asyncrl.rollout.trajectory import SampleId, VerifiableTrajectory
from benchmarks.harness import parser_of, report, table
from benchmarks.tiny_models import qwen3, random_trajectory

VOCABULARY, GROUP_SIZE, MODES = 8192, 4, ("optimizer", "full")
LENGTH = 256
"""Tokens of each sample, of which a quarter are the prompt."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
"""glibc's: blocks from this size on go back to the system when they are freed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "34M parameters instead of 82M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--groups", type=int, default=2, help="micro-batches of each rank in a step"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--checkpointing", action="store_true", help="trainer.gradient_checkpointing"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank is not None:
        _rank(json.loads(args.rank))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        raw = {mode: _mode(Path(folder), args, mode) for mode in MODES}
    full, plain = raw["full"], raw["optimizer"]
    ratios = {
        "peak_full_vs_optimizer": full["peak"] / plain["peak"],
        "seconds_full_vs_optimizer": full["seconds"] / plain["seconds"],
        "bytes_vs_least": full["sent"] / full["least"],
    }
    report(args, "ranks", raw, ratios, _table(raw, args))
    return 0


def _mode(folder: Path, args: argparse.Namespace, mode: str) -> dict[str, Any]:
    hidden, layers = (128, 1) if args.smoke else (512, 8) if args.quick else (768, 10)
    plan = {
        "folder": str(folder),
        "model": _model(folder, hidden, layers),
        "meeting": str(folder / f"meeting-{mode}"),
        "groups": 1 if args.smoke else args.groups,
        "steps": 2 if args.smoke else args.steps,
        "settings": {
            "ranks": args.ranks,
            "sharding": mode,
            "dtype": args.dtype,
            "fused": False,
            "device": "cpu",
            "threads": 1,
            "gradient_checkpointing": args.checkpointing,
            "async_checkpoints": False,
        },
    }
    if args.smoke:
        found = _ranks(plan, GIVEN_BACK)
        timed = found[0]
    else:
        timed = _ranks(plan, {})[0]
        found = _ranks(plan | {"steps": 2}, GIVEN_BACK)
    memory = {name: max(one[name] for one in found) for name in ("peak", "at_start")}
    return timed | memory


def _ranks(plan: dict[str, Any], environment: dict[str, str]) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    ranks = plan["settings"]["ranks"]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", "--rank", json.dumps(plan | {"rank": rank})],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    return [json.loads(child.communicate(timeout=3000)[0]) for child in children]


def _model(folder: Path, hidden: int, layers: int) -> str:
    path = folder / "model"
    if not path.exists():
        settings = {"max_position_embeddings": LENGTH, "tie_word_embeddings": False}
        qwen3(VOCABULARY, hidden, layers, **settings).save_pretrained(path)
    return str(path)


def _rank(plan: dict[str, Any]) -> None:
    from asyncrl.trainer.base.config import TrainerConfig
    from asyncrl.trainer.learner import Learner
    from asyncrl.trainer.model.memory_estimate import ModelShape, Samples, step_memory
    from asyncrl.trainer.ranks.world import join
    from asyncrl.trainer.sharding.lockstep import NextAction, RankStatus, RankWork

    config = TrainerConfig.model_validate(plan["settings"]).for_device(None)
    world = join(
        Path(plan["meeting"]), plan["rank"], config.ranks,
        on_gpu=False, join_seconds=600, seconds=1800,
    )  # fmt: skip
    learner = Learner(config, plan["model"], group_size=GROUP_SIZE, seed=0, world=world)
    world.barrier("the start")
    before_model = _forget_peak()
    seconds, sent, gradients = [], [], 0
    for step in range(plan["steps"]):
        mine = range(plan["rank"], plan["groups"] * config.ranks, config.ranks)
        groups = [_group(1000 * step + one, step) for one in mine]
        world.barrier("the step")
        began, before = time.perf_counter(), _loopback()
        for group in groups:
            learner.add_group(group, np.random.default_rng(1).normal(size=GROUP_SIZE))
        while learner.lockstep.agree(RankStatus(RankWork.DONE)) is NextAction.COMPUTE:
            learner.pad()
        gradients = _bytes_of(one.grad for one in learner.policy.model.parameters())
        learner.step()
        world.barrier("the end of the step")
        seconds.append(time.perf_counter() - began)
        sent.append(_loopback() - before)
    shape = ModelShape.of(json.loads((Path(plan["model"]) / "config.json").read_text()))
    assert shape is not None
    needs = step_memory(shape, config, Samples(LENGTH, GROUP_SIZE), on_gpu=False)
    full = config.sharding == "full"
    low = 2 if config.compute_dtype == "bfloat16" else 4
    others = shape.parameters * (config.ranks - 1)
    least = plan["groups"] * others * (2 * low + 4)
    print(json.dumps({
        "parameters": shape.parameters,
        "seconds": statistics.median(seconds[1:] or seconds),
        "sent": statistics.median(sent[1:] or sent),
        "least": least if full else 2 * 4 * others,
        "peak": _peak(),
        "at_start": before_model,
        "held": {
            "weights": _bytes_of(learner.policy.model.parameters()),
            "gradients": gradients,
            "moments": _bytes_of(
                one
                for state in learner._update.optimizer.state.values()  # noqa: SLF001
                for one in state.values()
            ),
        },
        "share": {  # of the arithmetic
            "weights": shape.parameters * 4 // (config.ranks if full else 1),
            "gradients": shape.parameters * 4 // (config.ranks if full else 1),
            "moments": shape.parameters * 8 // config.ranks,
        },
        "estimate": needs.device,
        "kinds": dict(needs.kinds()),
    }))  # fmt: skip
    world.close()


def _group(number: int, version: int) -> list[VerifiableTrajectory]:
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, VOCABULARY, LENGTH // 4).astype(np.int32)
    return [
        random_trajectory(
            rng, SampleId(number, sample), prompt, LENGTH - len(prompt), VOCABULARY, version
        )
        for sample in range(GROUP_SIZE)
    ]


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Of this rank's parts, each memory once."""
    from asyncrl.trainer.sharding.rows import local

    parts = [local(one) for one in tensors if one is not None]
    return sum({one.data_ptr(): one.nbytes for one in parts if one.ndim}.values())


def _forget_peak() -> int:
    """Forget the peak of loading, which holds the whole model; gives the bytes that are held."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(one for one in lines if one.startswith(name)).split()[1]) * 1024


def _loopback() -> int:
    """Bytes that were sent over the loopback interface, of all ranks."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(one for one in lines if one.strip().startswith("lo:")).split(":")[1].split()
    return int(fields[8])


def _table(raw: dict[str, Any], args: argparse.Namespace) -> Table:
    count = raw["full"]["parameters"] / 1e6
    kinds = ("weights", "gradients", "moments")

    def mb(one: dict[str, Any], *names: str) -> list[str]:
        return [f"{one[name] / 1e6:,.0f}" for name in names]

    return table(
        f"{count:.0f}M parameters, {args.ranks} ranks, {args.dtype}; (by arithmetic)",
        ("sharding", "s a step", "MB of a rank", "estimate", *kinds, "MB sent", "least"),
        (
            (
                mode, one["seconds"], *mb(one, "peak", "estimate"),
                *(f"{mb(one['held'], k)[0]} ({mb(one['share'], k)[0]})" for k in kinds),
                *mb(one, "sent", "least"),
            )
            for mode, one in raw.items()
        ),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
