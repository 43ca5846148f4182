"""Plain against drafted generation: the same prompts and weights, both engines, in one run.

    python -m benchmarks.rollout [--quick] [--widened [SIZE]] [--json FILE]

Each side has an engine of its own, the plain one without any drafter, since a vLLM that could draft
is not the fastest plain one. A repeat takes prompts that no pass has seen:

    epoch 1   the drafting engine writes all samples once; the cache is filled (drafts come from
              running and finished siblings only)
    epoch 2   the plain and the drafting engine write them with the same new seeds, in turns: who
              goes first alternates, and both are timed

Ratios are medians over the repeats: ENGINE_bROWS_drafted_vs_plain is tokens per second in epoch 2
(`range`: of the single repeats), ENGINE_bROWS_first_epoch_vs_plain the drafting engine's epoch 1
over the same plain passes. Accepted tokens are per forward pass, all its rows together. The weights
stay the same between the epochs, so acceptance is at its best; in training they drift. Passes are
sized by the plain engine's warm-up so that each takes about the same time.

The built-in model is tiny: a step costs overhead, not memory traffic. `--widened` makes it cost
what a big model does without changing what it says (see `benchmarks.widen`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from asyncrl.tasks.prompts import Prompt, Task
from benchmarks.report import write_json
from benchmarks.rollout_findings import Findings, Pass, Rows
from benchmarks.widen import widen
from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.factory import create_engine
from engine.protocol import Engine, GenerateRequest, SamplingParams

KINDS = ("torch", "vllm")
GROUP = 8
"""Samples of one prompt, as in training."""
MAX_TOKENS = 48
MOST_SAMPLES = 1024
PASS_SECONDS = 300.0
"""Longest wait for one pass."""
SETTLE_SECONDS = 0.25
"""Between passes, so that threads of the side that was just timed have gone to sleep."""
WIDE = 1 << 17
"""Intermediate size that gives the built-in model 101 million parameters."""
QUICK_ROWS, FULL_ROWS = (1, 8, 32), (1, 2, 8, 32, 128)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rows: tuple[int, ...]
    """Requests at a time."""
    repeats: int
    seconds: float
    """What a plain pass should take."""


class Bench:
    """One kind of engine, twice: plain and drafting."""

    def __init__(self, kind: str, model: str, task: Task, plan: Plan) -> None:
        config = EngineConfig.model_validate(
            {"kind": kind, "slots": max(plan.rows), "max_model_len": 128}
        )
        off = CacheConfig(enabled=False)
        self.plain = create_engine(config, model, cache_config=off, seed=0)
        self.drafting = create_engine(config, model, cache_config=CacheConfig(), seed=0)
        self.task = task
        self.plan = plan
        self._unseen = iter(task.train)
        self._numbers = itertools.count()
        self._seeds = itertools.count(1)

    async def run(self) -> dict[int, Rows]:
        """Start both engines and measure each number of rows.

        Raises:
            EngineError: an engine could not start, failed, or took too long.
        """
        try:
            await self.plain.start()
            await self.drafting.start()
            return {rows: await self._measure(rows) for rows in self.plan.rows}
        finally:
            await self.plain.close()
            await self.drafting.close()

    async def _measure(self, rows: int) -> Rows:
        prompts = self._take(-(-2 * rows // GROUP))
        for engine in (self.plain, self.drafting, self.drafting):  # compilation, first touches
            warm = await self._pass(engine, prompts, rows, self._new_seed())
        warm = await self._pass(self.plain, prompts, rows, self._new_seed())
        length = warm.tokens / (len(prompts) * GROUP)
        wanted = warm.rate * self.plan.seconds / length
        groups = -(-int(min(max(wanted, 2 * rows), MOST_SAMPLES)) // GROUP)
        result = Rows(samples=groups * GROUP)
        for repeat in range(self.plan.repeats):
            prompts = self._take(groups)
            first = await self._pass(self.drafting, prompts, rows, self._new_seed())
            result.first_epoch.append(first)
            turns = [(self.plain, result.plain), (self.drafting, result.drafted)]
            seed = self._new_seed()
            for engine, passes in turns if repeat % 2 == 0 else reversed(turns):
                passes.append(await self._pass(engine, prompts, rows, seed))
        return result

    def _take(self, count: int) -> list[Prompt]:
        taken = list(itertools.islice(self._unseen, count))
        if len(taken) < count:
            raise RuntimeError("the task has too few prompts: fewer rows or repeats, please")
        return taken

    def _new_seed(self) -> int:
        """Seeds of different passes do not overlap: they differ above the lowest 32 bits."""
        return next(self._seeds) << 32

    async def _pass(self, engine: Engine, prompts: Sequence[Prompt], rows: int, seed: int) -> Pass:
        """Write GROUP samples of each prompt, `rows` at a time."""
        await asyncio.sleep(SETTLE_SECONDS)
        number = next(self._numbers)
        room = asyncio.Semaphore(rows)

        async def one(index: int) -> int:
            prompt = prompts[index // GROUP]
            request = GenerateRequest(
                request_id=f"{number}-{index}",
                cache_key=prompt.prompt_id,
                prompt_tokens=prompt.tokens,
                sampling=SamplingParams(
                    max_tokens=MAX_TOKENS, stop_tokens=self.task.stop_tokens, seed=seed + index
                ),
            )
            async with room:
                return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

        before = engine.stats()
        began = time.perf_counter()
        try:
            async with asyncio.timeout(PASS_SECONDS):
                tokens = sum(
                    await asyncio.gather(*(one(index) for index in range(len(prompts) * GROUP)))
                )
        except TimeoutError as error:
            raise EngineError(
                f"{len(prompts) * GROUP} samples, {rows} at a time, were not written within "
                f"{PASS_SECONDS:.0f} s"
            ) from error
        seconds = time.perf_counter() - began
        after = engine.stats()
        return Pass(
            tokens,
            seconds,
            after.steps - before.steps,
            after.tokens_drafted - before.tokens_drafted,
            after.tokens_accepted - before.tokens_accepted,
        )


def measure(kinds: Sequence[str], model: str, task: Task, plan: Plan) -> Findings:
    """Each kind of engine, one after the other; one that cannot run does not hide the others."""
    findings = Findings()
    for kind in KINDS:
        if kind not in kinds:
            findings.missing[kind] = "left out by --engines"
        elif util.find_spec(kind) is None:
            findings.missing[kind] = f"{kind} is not installed (`make bench` installs it)"
        else:
            try:
                findings.measured[kind] = asyncio.run(Bench(kind, model, task, plan).run())
            except EngineError as error:
                findings.missing[kind] = f"failed: {error}"
                findings.failed = True
    return findings


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no engine {unknown[0]!r}; there are {', '.join(KINDS)}")
    return kinds


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers like 1,8,32")
    return numbers


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument("--engines", type=_kinds, default=list(KINDS), help="default: torch,vllm")
    parser.add_argument("--rows", type=_numbers, help="requests at a time, e.g. 1,8,32")
    parser.add_argument(
        "--widened",
        type=int,
        nargs="?",
        const=WIDE,
        metavar="SIZE",
        help=f"give the model this intermediate_size (without a number {WIDE})",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    rows = options.rows or (QUICK_ROWS if options.quick else FULL_ROWS)
    plan = Plan(rows, repeats=3, seconds=0.7) if options.quick else Plan(rows, 7, 2.0)
    load = os.getloadavg()[0]
    disable_progress_bar()
    raw: dict[str, Any] = {"model": "builtin:arithmetic", "load_before": load}
    model = str(ensure_builtin_model(default_cache_dir()))
    with tempfile.TemporaryDirectory() as folder:
        if options.widened:
            raw["parameters"] = widen(model, Path(folder), options.widened)
            raw["intermediate_size"] = options.widened
            model = folder
        task = load_task(TaskConfig(train_size=1 << 14), model, 0)
        findings = measure(options.engines, model, task, plan)
    console = Console(width=120)
    console.print(findings.table())
    for kind, reason in findings.missing.items():
        console.print(f"[bold red]{kind} was NOT measured:[/] {reason}")
    if options.json:
        write_json(options.json, "rollout", raw | asdict(plan) | findings.raw(), findings.ratios())
    return 1 if findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
