"""Speed and quality of the cache, compared with ArcticInference's and a naive one.

    python -m benchmarks.cache [--quick] [--json FILE]

All drafters (`benchmarks.cache.baselines`) get the same rollouts, in one thread and in turns, each
time from empty. The statistic is the median of several repeats, of processor time (only the start
of a process is wall time). Memory per token is the growth of a new process. If ArcticInference is
not installed, its ratios are left out and a message says so.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.exchange import SharedCache
from asyncrl.cache.tree.rollout_tree import RolloutCache, warm_up
from asyncrl.rollout.trajectory import IntArray
from benchmarks.cache.baselines import (
    BUDGET,
    GROUP,
    MAX_REQUESTS,
    OWN_DEPTH,
    PROMPT,
    VLLM_DEPTH,
    ArcticDrafter,
    NaiveDrafter,
    arctic,
    insert_speed,
    replay,
    rollouts,
    step_speed,
)
from benchmarks.harness import in_turns, medians, parser_of, pick, report, table, targets_table


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tree(samples: list[IntArray], prompts: int) -> dict[str, float]:
    """Asyncrl's cache: bytes by the system's count and by its own."""
    warm_up()
    before = resident_bytes()
    cache = RolloutCache(CacheConfig(max_bytes=1 << 30))
    for index, tokens in enumerate(samples):
        cache.insert(f"prompt {index % (prompts * GROUP) // GROUP}", PROMPT, tokens)
    grown = resident_bytes() - before
    stats = cache.stats()
    return {"resident": grown, "own_count": stats.bytes, "tokens": stats.tokens}


def suffix(samples: list[IntArray], prompts: int) -> dict[str, float]:  # noqa: ARG001
    """ArcticInference's with vLLM's settings: by the system's count and by its own estimate."""
    found = arctic()
    if found is None:
        raise SystemExit("arctic-inference is not installed")
    make = found[0]
    make(max_tree_depth=VLLM_DEPTH).start_request(0, PROMPT)  # triggers its lazy imports
    before = resident_bytes()
    cache = make(max_tree_depth=VLLM_DEPTH, max_cached_requests=MAX_REQUESTS)
    total = 0
    for request, tokens in enumerate(samples):
        cache.start_request(request, PROMPT)
        cache.add_active_response(request, tokens)
        cache.stop_request(request)
        total += len(tokens)
    grown = resident_bytes() - before
    estimate = cache._global_tree.estimate_memory()  # noqa: SLF001 - a cross-check, not used in a ratio
    return {"resident": grown, "own_count": estimate, "tokens": total}


def measure_memory(who: str, prompts: int, epochs: int, length: int) -> dict[str, float]:
    """Bytes per token, measured in a new process."""
    code = f"from benchmarks.cache.main import grow; grow({who!r}, {prompts}, {epochs}, {length})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    raw = json.loads(done.stdout)
    return {
        "tokens": raw["tokens"],
        "bytes_per_token": raw["resident"] / raw["tokens"],
        "bytes_per_token_own_count": raw["own_count"] / raw["tokens"],
    }


def grow(who: str, prompts: int, epochs: int, length: int) -> None:
    """Print how this process grows by so many rollouts."""
    samples = [tokens for epoch in rollouts(prompts, epochs, length) for tokens in epoch]
    print(json.dumps({"tree": tree, "arctic": suffix}[who](samples, prompts)))


RING = 4 << 20


def measure_exchange(samples: list[IntArray]) -> dict[str, float]:
    """One member finishes rollouts, another inserts them; both in this process, in turns."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
    with tempfile.TemporaryDirectory(dir=place) as directory:
        one, other = (
            SharedCache(CacheConfig(), Path(directory) / "x", name, ring_bytes=RING)
            for name in ("one", "other")
        )
        plain = RolloutCache(CacheConfig())
        one.poll()
        publish = receive = ordinary = 0.0
        for first in range(0, len(samples), GROUP):
            group = samples[first : first + GROUP]
            rows = [one.open(f"prompt {first}", PROMPT) for _ in group]
            for row, tokens in zip(rows, group, strict=True):
                one.extend(np.array([row]), tokens, np.array([0, len(tokens)]))
            start = time.process_time()
            for row in rows:
                one.close(row)
            middle = time.process_time()
            while other.poll():
                pass
            end = time.process_time()
            for tokens in group:
                plain.insert(f"prompt {first}", PROMPT, tokens)
            ordinary += time.process_time() - end
            receive += end - middle
            publish += middle - start
        start = time.process_time()
        for _ in range(1000):
            other.poll()
        idle = time.process_time() - start
        one.leave()
        other.leave()
    assert other.received_tokens == one.published_tokens == sum(map(len, samples))
    scale = 1e6 / one.published_tokens
    return {
        "publish_us_per_token": publish * scale,
        "receive_us_per_token": receive * scale,
        "insert_us_per_token": ordinary * scale,
        "idle_poll_us": idle * 1e3,
        "bytes_per_token": one.published_bytes / one.published_tokens,
    }


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
    turns = {name: partial(_once, make, batch, plan.steps) for name, make in makers.items()}
    out = {}
    for name, repeats in in_turns(turns, plan.repeats).items():
        out[name] = medians(repeats)
        for key in ("insert_tokens_per_s", "step_256_rows_total_us"):
            values = [run[key] for run in repeats]
            out[name] |= {f"{key}_lowest": min(values), f"{key}_highest": max(values)}
    return out


def _once(
    make: Make, batch: Sequence[list[IntArray]], steps: int, _repeat: int
) -> dict[str, float]:
    drafter = make()
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
    raw: dict[str, Any] = {}
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
    raw["exchange"] = measure_exchange(batch[0])
    raw["tree"]["memory"] = measure_memory("tree", *plan.memory)
    baseline = arctic()
    if baseline is None:
        raw["not_measured"] = {"arctic": MISSING}
    else:
        raw["arctic_inference"] = baseline[1]
        raw[ARCTIC]["memory"] = measure_memory("arctic", *plan.memory)
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


def tables(raw: dict[str, Any]) -> list[Table]:
    """The drafters side by side, and what sharing between generators costs."""
    names = [name for name in ("tree", ARCTIC, ARCTIC_DEEP, "naive") if name in raw]
    rows: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("insertion, M tokens/s", lambda n: n["insert_tokens_per_s"] / 1e6),
        ("256 rows: add 5 + draft, us per row", lambda n: n["step_256_rows_total_us"]),
        ("  of it drafting", lambda n: n["step_256_rows_draft_us"]),
        ("  tokens drafted", lambda n: n["step_256_rows_drafted_tokens"]),
        ("1 row: add 5 + draft, us", lambda n: n["step_1_row_total_us"]),
        ("bytes per token, resident", lambda n: n["memory"]["bytes_per_token"]),
        ("  by its own count", lambda n: n["memory"]["bytes_per_token_own_count"]),
        ("tokens per step, epoch 1", lambda n: n["first_epoch"]["tokens_per_step"]),
        ("tokens per step, epoch 2", lambda n: n["second_epoch"]["tokens_per_step"]),
        ("drafts accepted, epoch 2", lambda n: n["second_epoch"]["accepted_share"]),
    ]

    def found(of: Callable[[dict[str, Any]], float], name: str) -> float | None:
        with contextlib.suppress(KeyError):  # memory is not measured for all
            return of(raw[name])
        return None

    cells = ((label, *(found(of, name) for name in names)) for label, of in rows)
    sides = table("cache", ("one core, processor time", *names), cells)
    return [sides, table("exchange", "sharing between generators,", raw["exchange"].items())]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__, "less of everything: about a minute").parse_args(arguments)
    raw, ratios = measure(pick(options, FULL, QUICK, SMOKE))
    if "not_measured" in raw:
        print(MISSING)
    known = {name: target for name, target in TARGETS.items() if name in ratios}
    limits = targets_table(ratios, known, known.keys() - {"bytes_vs_arctic"})
    report(options, "cache", raw, ratios, *tables(raw), limits)
    return 0
