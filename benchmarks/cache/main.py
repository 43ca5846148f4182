"""Speed and quality of the cache, compared with ArcticInference's and a naive one.

    python -m benchmarks.cache [--quick] [--json FILE]

All drafters (`benchmarks.cache.baselines`) get the same rollouts (`benchmarks.cache.work`). One
thread. Processor time, which depends less on other users of a shared machine (only the start of a
process is wall time). The median of several repeats, the drafters in turns, each time from empty.
Memory per token is the growth of a new process (`benchmarks.cache.memory`). If ArcticInference is
not installed, its ratios are left out and a message says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache, warm_up
from asyncrl.rollout.trajectory import IntArray
from benchmarks.cache import exchange as cache_exchange
from benchmarks.cache import memory as cache_memory
from benchmarks.cache.baselines import OWN_DEPTH, VLLM_DEPTH, ArcticDrafter, NaiveDrafter, arctic
from benchmarks.cache.work import BUDGET, insert_speed, replay, rollouts, step_speed
from benchmarks.report import add_smoke, write_json

TARGETS = {"insert_vs_arctic": 8.0, "step_vs_arctic": 8.0, "bytes_vs_arctic": 0.5}
"""The last one is an upper bound."""
ARCTIC = f"arctic depth {VLLM_DEPTH}"
ARCTIC_DEEP = f"arctic depth {OWN_DEPTH}"
MISSING = (
    "MISSING: arctic-inference is not installed, so there are no ratios against it "
    "(pip install 'arctic-inference==0.3.0', or make bench; it is compiled for about 80 s)"
)


@dataclass(frozen=True)
class Plan:
    prompts: int
    """Prompts, each with eight rollouts per epoch."""
    length: int
    """Tokens of a rollout."""
    steps: int
    """Decode steps that are timed."""
    repeats: int
    replayed: int
    """Prompts that are replayed to measure the quality of drafts."""
    memory: tuple[int, int, int]
    """Prompts, epochs and length of the rollouts whose memory is measured."""
    compiles: bool = True
    """Whether the kernels are compiled once more, to see how long that takes."""


QUICK = Plan(prompts=32, length=400, steps=40, repeats=3, replayed=4, memory=(64, 2, 1000))
FULL = Plan(prompts=32, length=1000, steps=100, repeats=5, replayed=8, memory=(64, 4, 1000))
SMOKE = Plan(2, length=60, steps=5, repeats=1, replayed=1, memory=(2, 1, 50), compiles=False)

Make = Callable[[], Any]


def drafters() -> dict[str, Make]:
    """Name and constructor of each drafter; asyncrl's may draft all 32 tokens of a step."""
    config = CacheConfig(max_draft_tokens=BUDGET, min_probability=0.0)
    found: dict[str, Make] = {"tree": lambda: RolloutCache(config), "naive": NaiveDrafter}
    baseline = arctic()
    if baseline is not None:
        make = baseline[0]
        found[ARCTIC] = lambda: ArcticDrafter(make, VLLM_DEPTH)
        found[ARCTIC_DEEP] = lambda: ArcticDrafter(make, OWN_DEPTH)
    return found


def speeds(
    makers: dict[str, Make], batch: Sequence[list[IntArray]], plan: Plan
) -> dict[str, dict[str, Any]]:
    """For each drafter the medians over repeats in turns, and the range of two of them."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
    for _ in range(plan.repeats):
        for name, make in makers.items():
            runs[name].append(_once(make(), batch, plan.steps))
    out = {}
    for name, repeats in runs.items():
        numbers = {key: statistics.median(run[key] for run in repeats) for key in repeats[0]}
        for key in ("insert_tokens_per_s", "step_256_rows_total_us"):
            values = [run[key] for run in repeats]
            numbers[f"{key}_lowest"], numbers[f"{key}_highest"] = min(values), max(values)
        out[name] = numbers
    return out


def _once(drafter: Any, batch: Sequence[list[IntArray]], steps: int) -> dict[str, float]:
    if isinstance(drafter, ArcticDrafter):
        insert, step = drafter.insert_speed, drafter.step_speed
    else:
        insert = lambda samples: insert_speed(drafter, samples)  # noqa: E731
        step = lambda samples, steps: step_speed(drafter, samples, steps)  # noqa: E731
    numbers = {"insert_tokens_per_s": insert(batch[0])}
    for rows, samples in ((256, batch[1][:256]), (1, batch[1][:1])):
        for key, value in step(samples, steps).items():
            numbers[f"step_{rows}_row{'s' if rows > 1 else ''}_{key}"] = value
    return numbers


def quality(makers: dict[str, Make], plan: Plan) -> dict[str, dict[str, Any]]:
    """Tokens per step and share accepted of each drafter, with its own default settings."""
    replayed = rollouts(plan.replayed, 2, plan.length, seed=1)
    out = {}
    for name, make in makers.items():
        drafter = RolloutCache(CacheConfig()) if name == "tree" else make()
        out[name] = {
            "first_epoch": replay(drafter, replayed[0], 16),
            "second_epoch": replay(drafter, replayed[1], 16),
        }
    return out


def load_seconds(directory: str) -> float:
    """Seconds until the kernels can be called in a new process (imports included)."""
    environment = os.environ | {"NUMBA_CACHE_DIR": directory}
    start = time.perf_counter()
    code = "from asyncrl.cache.tree.rollout_tree import warm_up; warm_up()"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)
    return time.perf_counter() - start


def measure(plan: Plan) -> tuple[dict[str, Any], dict[str, float]]:
    """Run everything; returns the raw numbers and the ratios."""
    raw: dict[str, Any] = {"load_average_before": os.getloadavg()}
    if plan.compiles:
        with tempfile.TemporaryDirectory() as directory:
            raw["cold_start_s"] = load_seconds(directory)
            raw["warm_start_s"] = load_seconds(directory)
    warm_up()
    makers = drafters()
    batch = rollouts(plan.prompts, 2, plan.length)
    raw |= speeds(makers, batch, plan)
    for name, numbers in quality(makers, plan).items():
        raw[name] |= numbers
    raw["exchange"] = cache_exchange.measure(batch[0])
    raw["tree"]["memory"] = cache_memory.measure("tree", *plan.memory)
    baseline = arctic()
    if baseline is None:
        raw["not_measured"] = {"arctic": MISSING}
    else:
        raw["arctic_inference"] = baseline[1]
        raw[ARCTIC]["memory"] = cache_memory.measure("arctic", *plan.memory)
    raw["load_average_after"] = os.getloadavg()
    return raw, ratios_of(raw)


def ratios_of(raw: dict[str, Any]) -> dict[str, float]:
    """Asyncrl's cache over the others, so that higher is better, except for bytes."""
    tree = raw["tree"]
    out = {}
    for baseline, label in ((ARCTIC, "arctic"), (ARCTIC_DEEP, "arctic_deep"), ("naive", "naive")):
        if baseline not in raw:
            continue
        other = raw[baseline]
        key = "step_256_rows_total_us"
        out[f"insert_vs_{label}"] = tree["insert_tokens_per_s"] / other["insert_tokens_per_s"]
        out[f"step_vs_{label}"] = other[key] / tree[key]
        if "memory" in other:
            out[f"bytes_vs_{label}"] = (
                tree["memory"]["bytes_per_token"] / other["memory"]["bytes_per_token"]
            )
        for key in ("tokens_per_step", "accepted_share"):
            out[f"{key}_vs_{label}"] = tree["second_epoch"][key] / other["second_epoch"][key]
    return out


def tables(raw: dict[str, Any], ratios: dict[str, float]) -> list[Table]:
    """The printed tables: the drafters side by side, and the ratios with their targets."""
    names = [name for name in ("tree", ARCTIC, ARCTIC_DEEP, "naive") if name in raw]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("insertion, M tokens/s", lambda n: f"{n['insert_tokens_per_s'] / 1e6:.2f}"),
        ("256 rows: add 5 + draft, us per row", lambda n: f"{n['step_256_rows_total_us']:.2f}"),
        ("  of it drafting", lambda n: f"{n['step_256_rows_draft_us']:.2f}"),
        ("  tokens drafted", lambda n: f"{n['step_256_rows_drafted_tokens']:.1f}"),
        ("1 row: add 5 + draft, us", lambda n: f"{n['step_1_row_total_us']:.1f}"),
        ("bytes per token, resident", lambda n: f"{n['memory']['bytes_per_token']:.1f}"),
        ("  by its own count", lambda n: f"{n['memory']['bytes_per_token_own_count']:.1f}"),
        ("tokens per step, epoch 1", lambda n: f"{n['first_epoch']['tokens_per_step']:.2f}"),
        ("tokens per step, epoch 2", lambda n: f"{n['second_epoch']['tokens_per_step']:.2f}"),
        ("drafts accepted, epoch 2", lambda n: f"{n['second_epoch']['accepted_share']:.2f}"),
    ]
    sides = Table("one core, processor time", *names, title="cache")
    for label, cell in rows:
        sides.add_row(label, *(_cell(cell, raw[name]) for name in names))
    compared = Table("ratio", "value", "target", title="ratios")
    for name, value in ratios.items():
        target = TARGETS.get(name)
        sign = "<=" if name.startswith("bytes") else ">="
        compared.add_row(name, f"{value:.2f}", f"{sign} {target:g}" if target else "")
    sharing = Table("sharing between generators", "", title="exchange")
    for name, value in raw["exchange"].items():
        sharing.add_row(name, f"{value:.3f}")
    return [sides, compared, sharing]


def _cell(cell: Callable[[dict[str, Any]], str], numbers: dict[str, Any]) -> str:
    try:
        return cell(numbers)
    except KeyError:
        return "-"  # memory is not measured for all


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cache", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: about a minute")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    raw, ratios = measure(SMOKE if options.smoke else QUICK if options.quick else FULL)
    console = Console()
    for table in tables(raw, ratios):
        console.print(table)
    if "cold_start_s" in raw:
        cold, warm = raw["cold_start_s"], raw["warm_start_s"]
        console.print(f"kernels compiled in {cold:.1f} s, loaded in {warm:.1f} s")
    console.print(
        f"load average {raw['load_average_before'][0]:.1f} before, "
        f"{raw['load_average_after'][0]:.1f} after"
    )
    if "not_measured" in raw:
        console.print(f"[bold red]{MISSING}[/]")
    if options.json:
        write_json(options.json, "cache", raw, ratios, smoke=options.smoke)
