"""The benchmarks that `python -m benchmarks.NAME` starts, and their `--smoke`."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import NO_CLAIM

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "routing_sglang": "the process of SGLang of `benchmarks.routing --sglang`",
    "weights_nodes": "a node or a receiver of `benchmarks.weights --part chain` and `broadcast`",
}
"""Modules that are started by benchmarks, and by nobody else."""
LIGHT = (
    "cache",
    "controller",
    "delivery",
    "exactness",
    "gpu_plan",
    "long_tail",
    "noise_floor",
    "routing",
    "scaling",
    "scheduler",
    "slow_environments",
    "torch_host",
    "trainer",
    "turns",
    "warm_start",
    "weights",
)
"""Without a run."""
IN_THREADS = (
    "pipeline",
    "rollout",
    "simulation",
)
ELSEWHERE = {
    "mutants": "tests/benchmarks/test_mutants.py runs it on a tree of its own",
    "engines": "engine starts: tests/engine/remote runs both real engines",
    "vllm_host": "two starts of vLLM",
    "soak": "a run of several processes; tests/benchmarks/test_soak.py has its arithmetic",
}
"""Not run, with the reason; each has its `--smoke`."""
PROCESSES = ("chaos", "hostile", "live_audit", "paced", "peers", "watchers")


def benchmark_names() -> list[str]:
    """All benchmarks: modules and packages that can be started."""
    folder = ROOT / "benchmarks"
    packages = [path.parent.name for path in folder.glob("*/__main__.py")]
    modules = [
        path.stem
        for path in folder.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    return sorted({*packages, *modules} - PARTS.keys())


def main_of(name: str) -> Any:
    """The `main` of a benchmark, which its command calls."""
    package = ROOT / "benchmarks" / name
    if not package.is_dir():
        return importlib.import_module(f"benchmarks.{name}").main
    last = "main" if (package / "main.py").exists() else "__main__"
    return importlib.import_module(f"benchmarks.{name}.{last}").main


def smoke(name: str, file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """Go the whole way of a benchmark with the least work, and read what it has written.

    Args:
        name: of the benchmark.
        file: where its JSON goes.
        capsys: what it prints must begin with the words that no claim follows.
        more: further arguments.
    """
    try:
        assert not main_of(name)(["--smoke", *more, "--json", str(file)])
    finally:
        torch.set_num_threads(1)  # as all tests have; some benchmarks set their own
    assert capsys.readouterr().out.startswith(NO_CLAIM)
    written: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert (written["name"], written["smoke"]) == (name, True)
    assert {"date", "machine", "versions", "raw"} <= written.keys()
    assert all(math.isfinite(value) for value in written["ratios"].values())
    return written
