"""Plain against drafted generation: the same prompts and weights, both engines, in one run.

    python -m benchmarks.rollout --quick --json FILE

Each side has an engine of its own, the plain one without any drafter. The drafting engine has
written every prompt once before the clock starts (epoch 1); measured are later epochs, with fresh
randomness, in turns (plain, drafted, plain, drafted, ...), of which medians are taken. The weights
do not change between the epochs, so acceptance is at its best; in a run they drift.

Ratios: ENGINE_bROWS_drafted_vs_plain, tokens per second of one over the other.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from asyncrl.tasks.prompts import Task
from benchmarks.report import write_json
from benchmarks.widen import widen
from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.factory import create_engine
from engine.protocol import Engine, EngineStats, GenerateRequest, SamplingParams

GROUP = 8
"""Samples of one prompt, as in training."""
MAX_TOKENS = 48


@dataclass(frozen=True)
class Measured:
    """One timed pass."""

    tokens: int
    seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Work:
    """What every pass does: `requests` samples, `rows` of them at a time."""

    task: Task
    rows: int
    requests: int


async def one_pass(engine: Engine, work: Work, epoch: int, *, draft: bool) -> Measured:
    """Write all samples of the work once and take the engine's counters before and after."""
    room = asyncio.Semaphore(work.rows)
    group = min(GROUP, work.rows)

    async def one(index: int) -> int:
        prompt = work.task.train[index // group]
        request = GenerateRequest(
            request_id=f"{epoch}-{index}",
            cache_key=prompt.prompt_id if draft else "",
            prompt_tokens=prompt.tokens,
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS,
                stop_tokens=work.task.stop_tokens,
                seed=1 + epoch * work.requests + index,
            ),
        )
        async with room:
            return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

    before = engine.stats()
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(index) for index in range(work.requests))))
    seconds = time.perf_counter() - began
    return _difference(before, engine.stats(), tokens, seconds)


def _difference(a: EngineStats, b: EngineStats, tokens: int, seconds: float) -> Measured:
    return Measured(
        tokens,
        seconds,
        b.steps - a.steps,
        b.tokens_drafted - a.tokens_drafted,
        b.tokens_accepted - a.tokens_accepted,
    )


async def compare(
    kind: str, model: str, task: Task, rows: list[int], *, repeats: int, waves: int
) -> dict[int, dict[str, list[Measured]]]:
    """Plain and drafted passes at each number of rows, in turns."""
    results: dict[int, dict[str, list[Measured]]] = {}
    slots = max(rows)
    config = EngineConfig.model_validate(
        {"kind": kind, "slots": slots, "max_model_len": 128}
    )
    plain = create_engine(config, model, cache_config=CacheConfig(enabled=False), seed=0)
    drafted = create_engine(config, model, cache_config=CacheConfig(), seed=0)
    try:
        await plain.start()
        await drafted.start()
        for number in rows:
            work = Work(task, number, requests=max(16, number * waves))
            passes: dict[str, list[Measured]] = {"plain": [], "drafted": []}
            for epoch in range(repeats + 1):
                for name, engine in (("plain", plain), ("drafted", drafted)):
                    measured = await one_pass(engine, work, epoch, draft=name == "drafted")
                    if epoch:  # the first fills the cache and warms both up
                        passes[name].append(measured)
            results[number] = passes
    finally:
        await plain.close()
        await drafted.close()
    return results


def summarize(passes: dict[str, list[Measured]]) -> dict[str, float]:
    """Medians and their ratio."""
    plain = statistics.median(m.rate for m in passes["plain"])
    drafted = statistics.median(m.rate for m in passes["drafted"])
    proposed = sum(m.drafted for m in passes["drafted"])
    accepted = sum(m.accepted for m in passes["drafted"])
    steps = max(1, sum(m.steps for m in passes["drafted"]))
    return {
        "plain_tokens_per_second": plain,
        "drafted_tokens_per_second": drafted,
        "accepted_tokens_per_step": accepted / steps,
        "acceptance": accepted / proposed if proposed else 0.0,
        "ratio": drafted / plain,
    }


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repetitions")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--engines", default="torch,vllm", help="which, separated by commas")
    parser.add_argument("--rows", help="requests at a time, separated by commas")
    parser.add_argument(
        "--widened", type=int, default=0, metavar="SIZE", help="intermediate_size of the model"
    )
    options = parser.parse_args()
    rows = [
        int(n) for n in (options.rows or ("1,8,32" if options.quick else "1,2,8,32,64")).split(",")
    ]
    console = Console()
    model = str(ensure_builtin_model(default_cache_dir()))
    parameters = 0
    raw: dict[str, object] = {"model": "builtin:arithmetic", "rows": rows}
    ratios: dict[str, float] = {}
    table = Table(
        "engine", "rows", "plain tok/s", "drafted tok/s", "accepted/step", "acceptance", "ratio"
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.widened:
            parameters = widen(model, Path(folder), options.widened)
            model = folder
            raw |= {"widened_to": options.widened, "parameters": parameters}
        task = load_task(TaskConfig(), model, 0)
        for kind in options.engines.split(","):
            if kind == "vllm" and util.find_spec("vllm") is None:
                console.print(
                    "[bold red]vLLM is not installed: its half is MISSING (make bench)[/]"
                )
                raw["vllm"] = "not installed"
                continue
            passes = asyncio.run(
                compare(
                    kind,
                    model,
                    task,
                    rows,
                    repeats=3 if options.quick else 7,
                    waves=2 if options.quick else 4,
                )
            )
            for number, both in passes.items():
                found = summarize(both)
                ratios[f"{kind}_b{number}_drafted_vs_plain"] = found["ratio"]
                raw[f"{kind}_b{number}"] = found | {
                    name: [asdict(one) for one in ones] for name, ones in both.items()
                }
                table.add_row(
                    kind,
                    str(number),
                    f"{found['plain_tokens_per_second']:,.0f}",
                    f"{found['drafted_tokens_per_second']:,.0f}",
                    f"{found['accepted_tokens_per_step']:.2f}",
                    f"{found['acceptance']:.2f}",
                    f"{found['ratio']:.2f}",
                )
    console.print(table)
    if options.json:
        write_json(options.json, "rollout", raw, ratios)
        console.print(f"written: {options.json}", highlight=False)


if __name__ == "__main__":
    main()
