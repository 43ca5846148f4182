"""Parts of two processes that see one GPU each: a broadcast of weights, and a step of two ranks."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from asyncrl.gpu_check.parts import Context, PartFailed, Said

_APART = 0.02
"""Relative difference of gradient norms between ways to divide a step, for rounding."""


def nccl(context: Context) -> Said:
    """Send weights from one process to another, as `launcher.weights: broadcast` does."""
    mib = 1 if context.small else 1024
    sent, received = _pair("broadcast", context, mib=mib)
    if not received["equal"]:
        raise PartFailed("the received bytes differ from the sent ones", received)
    by = "NCCL" if context.gpus else "gloo (without a GPU)"
    connected, speed = sent["connect_seconds"], sent["gb_a_second"]
    return f"{by}: connected in {connected:.1f} s, {mib:,} MiB at {speed:.1f} GB/s", sent


def ranks(context: Context) -> Said:
    """Train a step on two ranks: with the optimizer's state in parts, and with all of it."""
    ours, others = _pair("step", context)
    norms = {mode: found["grad_norm"] for mode, found in ours.items()}
    numbers = {"rank 0": ours, "rank 1": others}
    one, other = norms["optimizer"], norms.get("full", norms["optimizer"])
    if abs(one - other) > _APART * one or not one > 0:
        raise PartFailed(f"the norm of the gradient depends on trainer.sharding: {norms}", numbers)
    said = [
        f"sharding: {mode} {ours[mode]['seconds']:.2f} s for {ours[mode]['tokens']:,} tokens a rank"
        for mode in norms
    ]
    if "full" not in norms:
        said.append("sharding: full needs a newer torch")
    return "; ".join(said), numbers


def _pair(what: str, context: Context, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=context.folder) as meeting:
        children = []
        for rank in range(2):
            task = {
                "what": what, "rank": rank, "meeting": meeting, "folder": str(context.folder),
                "gpus": min(context.gpus, 1), "small": context.small, **more,
            }  # fmt: skip
            command = [sys.executable, "-m", "asyncrl.gpu_check.two_ranks", json.dumps(task)]
            environment = os.environ | devices(rank, context.gpus)
            children.append(subprocess.Popen(command, env=environment))
        codes = [child.wait() for child in children]
        if any(codes):
            raise PartFailed(f"the processes ended with the exit codes {codes}")
        one, other = (
            json.loads(Path(meeting, f"said-{rank}").read_text(encoding="utf-8"))
            for rank in range(2)
        )
    return one, other


def devices(rank: int, gpus: int) -> dict[str, str]:
    """Return the environment of a process that sees one GPU."""
    if not gpus:
        return {"OMP_NUM_THREADS": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[rank].strip()}


def _broadcast(rank: int, meeting: Path, context: Context, mib: int) -> dict[str, Any]:
    import torch

    from asyncrl.wire.weights.broadcast.groups import GlooGroup, Group, Limits, NcclGroup

    began = time.perf_counter()
    store = torch.distributed.FileStore(str(meeting / "store"), 2)  # type: ignore[attr-defined]
    limits = Limits()
    group: Group
    if context.gpus:
        group = NcclGroup(store, rank, 2, torch.device("cuda", 0), limits)
    else:
        group = GlooGroup(store, rank, 2, "127.0.0.1", limits)
    connected = time.perf_counter()
    wanted = torch.arange(mib << 18, dtype=torch.int32, device=group.device)
    part = wanted.clone() if rank == 0 else torch.zeros_like(wanted)
    try:
        seconds = []
        for _ in range(3):
            again = time.perf_counter()
            group.begin(part.view(torch.uint8))
            group.wait()
            seconds.append(time.perf_counter() - again)
        equal = bool((part == wanted).all())
    finally:
        group.close()
    speed = part.nbytes / 1e9 / min(seconds)
    return {"connect_seconds": connected - began, "gb_a_second": speed, "equal": equal}


def _step(rank: int, meeting: Path, context: Context) -> dict[str, Any]:
    import numpy as np
    from torch.distributed.fsdp import FSDPModule

    from asyncrl.gpu_check.generating import random_model
    from asyncrl.gpu_check.training import GROUP_SIZE, group_of
    from asyncrl.trainer.base.config import TrainerConfig
    from asyncrl.trainer.learner import Learner
    from asyncrl.trainer.ranks.world import join
    from asyncrl.trainer.sharding.lockstep import NextAction, RankStatus, RankWork

    world = join(meeting / "ranks", rank, 2, on_gpu=context.gpus > 0, join_seconds=120, seconds=120)
    if rank == 0:
        random_model(context)
    world.barrier("the model")
    length = 16 if context.small else 1024
    found: dict[str, Any] = {}
    fsdp = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.11 lacks it
    modes: tuple[Literal["optimizer", "full"], ...] = (
        ("optimizer", "full") if fsdp else ("optimizer",)
    )
    for mode in modes:
        config = TrainerConfig(
            ranks=2, sharding=mode, dtype="bfloat16" if context.gpus else "float32",
            device=context.device, micro_batch_tokens=(GROUP_SIZE + 1) * length, fused=False,
            correction="none", async_checkpoints=False,
        )  # fmt: skip
        path = str(random_model(context))
        learner = Learner(config, path, group_size=GROUP_SIZE, seed=0, world=world)
        world.barrier("the start")
        began = time.perf_counter()
        group = group_of(rank, length, learner.policy.vocab_size)
        learner.add_group(group, np.arange(GROUP_SIZE, dtype=np.float32))
        while learner.lockstep.agree(RankStatus(RankWork.DONE)) is NextAction.COMPUTE:
            learner.pad()
        norm = learner.step().learning.grad_norm
        world.barrier("the end")
        seconds = time.perf_counter() - began
        found[mode] = {"seconds": seconds, "tokens": GROUP_SIZE * length, "grad_norm": norm}
    world.close()
    return found


def _main() -> None:
    task = json.loads(sys.argv[1])
    context = Context(Path(task["folder"]), task["gpus"], task["small"])
    rank, meeting = task["rank"], Path(task["meeting"])
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "broadcast": lambda: _broadcast(rank, meeting, context, task["mib"]),
        "step": lambda: _step(rank, meeting, context),
    }
    said = work[task["what"]]()
    Path(meeting, f"said-{rank}").write_text(json.dumps(said), encoding="utf-8")
    os._exit(0)  # FSDP2 and gloo may abort a process whose threads they have not joined yet


if __name__ == "__main__":
    _main()
