"""Who is compared, and how each is started: all train on the same configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.monitoring.records.metrics_log import read_metrics
from benchmarks.peers.shared_data import Step, read_steps
from benchmarks.peers.trl_environment import ensure_trl
from benchmarks.peers.workloads import EXAMPLES
from benchmarks.run_command import run_command

CONFIG = EXAMPLES / "arithmetic.yaml"
ROOT = EXAMPLES.parent
TRL, TRL_VLLM, LOOP = "TRL", "TRL + vLLM", "vLLM loop"
SYNC, KEEP, VERIFY, VERIFY_VLLM = "sync", "keep(1)", "verify", "verify on vLLM"
ON_POLICY_MODES = (SYNC, VERIFY, VERIFY_VLLM)
"""asyncrl's modes whose tokens are all drawn by the policy in training, as TRL's are."""
ESSENTIAL = (TRL, SYNC, VERIFY)
"""What --quick compares."""


@dataclass(frozen=True)
class Training:
    command: list[str]
    environment: dict[str, str]
    read: Callable[[], list[Step]]
    """Reads the steps after the training."""


@dataclass(frozen=True)
class Contestant:
    name: str
    threads: int
    """Of each of its processes that computes. One process has both cores, two have one each."""
    start: Callable[[tuple[str, ...], Path, int], Training]
    """From all `--set` values, an empty folder and the number of threads."""


def contestants() -> tuple[Contestant, ...]:
    """All of them, in the order in which they run."""
    keep = ("scheduler.on_update=keep",)
    verify = ("scheduler.on_update=verify", "scheduler.max_off_policy_steps=0")
    return (
        Contestant(TRL, 2, _trl()),
        Contestant(TRL_VLLM, 2, _trl("--vllm")),
        Contestant(LOOP, 2, _loop),
        Contestant(SYNC, 1, _asyncrl(*keep, "scheduler.max_off_policy_steps=0")),
        Contestant(KEEP, 1, _asyncrl(*keep, "scheduler.max_off_policy_steps=1")),
        Contestant(VERIFY, 1, _asyncrl(*verify)),
        Contestant(VERIFY_VLLM, 1, _asyncrl(*verify, "engine.kind=vllm")),
    )


def _trl(*more: str) -> Callable[[tuple[str, ...], Path, int], Training]:
    def start(settings: tuple[str, ...], folder: Path, threads: int) -> Training:
        log = folder / "steps.jsonl"
        module = ("-m", "benchmarks.peers.trl_train", str(CONFIG), str(log), *more)
        return Training(
            [str(ensure_trl()), *module, *_set(settings)],
            _environment(threads),
            lambda: read_steps(log),
        )

    return start


def _loop(settings: tuple[str, ...], folder: Path, threads: int) -> Training:
    log = folder / "steps.jsonl"
    module = ("-m", "benchmarks.peers.vllm_loop", str(CONFIG), str(log))
    return Training(
        [sys.executable, *module, "--threads", str(threads), *_set(settings)],
        _environment(threads),
        lambda: read_steps(log),
    )


def _asyncrl(*mode: str) -> Callable[[tuple[str, ...], Path, int], Training]:
    def start(settings: tuple[str, ...], folder: Path, threads: int) -> Training:
        own = (f"run.directory={folder}", "run.name=run", f"launcher.threads={threads}")
        command = run_command(CONFIG, (*settings, *mode, *own))

        def read() -> list[Step]:
            steps = read_metrics(folder / "run" / "metrics.jsonl")
            return [
                Step(step.wall_seconds, step.learning.reward_mean, step.batch.tokens)
                for step in steps
            ]

        return Training(command, {}, read)

    return start


def _set(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's default is a share of the machine's memory
    }
