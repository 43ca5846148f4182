"""How benchmarks.rollout times: alternating passes over prompts that were seen in epoch 1 only.

    epoch 1   under the earlier policy version, every engine with a cache generates GROUP samples of
              every prompt, FILL_ROWS at a time, which fills its cache as in training; not timed
    update    all engines, the plain one too, take the weights of the later version
    epoch 2   for each number of rows and repeat: fresh prompts, the same prompts and seeds for all
              contestants, one contestant after the other; the first one changes with each repeat

Requests are served ROWS at a time in the order of the prompts. So the samples of a prompt follow
each other, and in epoch 2 a drafter can also learn from siblings, as it can from the groups in
training. A pass ends with its last request; with more than one row, the last requests run with
fewer rows. Both hold for every contestant alike.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.worker.drafting import FixedBudget
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.wire.weights.writer import published
from benchmarks.rollout.contestants import CHAIN, OURS, PLAIN, SUFFIX, Contestant, with_torch
from benchmarks.rollout.findings import Kind, Pass, RepeatedPasses

ROWS = 8
BUDGETS = (16, 32, 64, 127)
"""Nodes per row. The one that counts is 32: with 8 rows it makes 264 tokens per forward pass, about
where a GPU stops waiting for memory. The others show the trend."""


def tree_and_chain(
    work: Workload, config: EngineConfig, repeats: int, budget: int
) -> tuple[float, float]:
    """Accepted drafts per forward pass of chain and tree, with `budget` nodes per row.

    The engines are created and closed here.
    """
    cache = CacheConfig(max_draft_tokens=budget, min_probability=0.0)
    both = [
        Contestant(
            name,
            create_engine(
                with_torch(config, draft_trees=name == OURS),
                str(work.earlier),
                cache_config=cache,
                seed=0,
            ),
            remembers=True,
        )
        for name in (CHAIN, OURS)
    ]
    plan = Plan(rows=(ROWS,), repeats=repeats, step_rows=(), overhead_repeats=0)
    with mock.patch("asyncrl.engine.torch.core.DraftPlanner", FixedBudget):
        found = asyncio.run(Bench(both, work, plan).run())
    at = found.rows[ROWS]
    chain, tree = (at.drafting(name)["accepted_per_step"] for name in (CHAIN, OURS))
    return chain, tree


GROUP = 8
"""Samples of one prompt, as in training."""
FILL_ROWS = 32
"""Requests at a time in epoch 1."""
PASS_SECONDS = 600.0
"""Longest wait for one pass."""
SETTLE_SECONDS = 0.25
"""Pause between passes, in which the threads of the contestant timed last go to sleep."""
OVERHEAD_ROWS = 64
"""Rows at which the overhead of drafting is measured."""
STEP_LENGTHS = (8, 32)
"""Tokens per row of the two passes whose difference gives the time of a decoding step. It contains
neither a prompt nor the end of a response (the shortest response has 42 tokens)."""


@dataclass(frozen=True)
class Plan:
    rows: tuple[int, ...]
    """Requests at a time."""
    repeats: int
    """Passes of each contestant per number of rows."""
    suffix_rows: int = 1 << 30
    """Most rows at which vLLM's own drafter takes part."""
    step_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Rows at which the time of a plain step is measured; () for none."""
    overhead_repeats: int = 5
    """Repeats of the measurement of the overhead; 0 for none."""

    def groups(self, rows: int) -> int:
        """Prompts of a pass: 4 samples per row up to 8 rows, 2 above."""
        return max(1, -(-(4 if rows <= 8 else 2) * rows // GROUP))


@dataclass(frozen=True)
class Workload:
    task: Task
    max_tokens: int
    """Most tokens of a response."""
    earlier: Path
    """HF directory of the version that generates epoch 1."""
    later: Path
    """HF directory of the version under which everything is timed."""


class Bench:
    """Measures one kind of engine with all its contestants."""

    def __init__(self, contestants: Sequence[Contestant], work: Workload, plan: Plan) -> None:
        self._contestants = contestants
        self._work = work
        self._plan = plan
        self._unseen = iter(work.task.train)
        self._numbers = itertools.count()
        self._seeds = itertools.count(1)
        self._found = Kind()
        self._began = time.monotonic()

    async def run(self) -> Kind:
        """Start everything, fill the caches, update the weights, measure."""
        try:
            for contestant in self._contestants:
                self._log(f"starting {contestant.name}")
                await contestant.start()
            await self._measure()
        finally:
            for contestant in self._contestants:
                await contestant.engine.close()
        return self._found

    async def _measure(self) -> None:
        plan = self._plan
        prompts = {
            rows: [self._take(plan.groups(rows)) for _ in range(plan.repeats)] for rows in plan.rows
        }
        warm = self._take(1)
        crowd = self._take(OVERHEAD_ROWS // GROUP) if plan.overhead_repeats else []
        for contestant in self._contestants:
            if contestant.remembers:
                batches = [
                    *(g for r in plan.rows if self._takes_part(contestant, r) for g in prompts[r]),
                    *([warm] if contestant.name == SUFFIX else [warm, crowd]),
                ]
                await self._fill(contestant, [prompt for batch in batches for prompt in batch])
        with published(_weights(self._work.later), 1) as manifest:
            for contestant in self._contestants:
                await contestant.engine.stage_weights(manifest)
        for contestant in self._contestants:
            await contestant.engine.install_weights(1)
        for rows in plan.rows:
            self._log(f"epoch 2, {rows} rows")
            self._found.rows[rows] = at = await self._epoch_two(rows, prompts[rows], warm)
            self._log(", ".join(f"{name} {at.rate(name):,.0f} tokens/s" for name in at.passes))
        self._log("steps alone")
        for rows in plan.step_rows:
            self._found.steps[rows] = await self._plain_step(rows)
        for repeat in range(plan.overhead_repeats):
            self._found.overhead.append(await self._overhead(crowd, repeat))

    async def _fill(self, contestant: Contestant, prompts: Sequence[Prompt]) -> None:
        """Epoch 1 of one contestant. All of them draw with the same seeds."""
        name = contestant.name
        self._log(f"epoch 1 of {name}: {len(prompts)} prompts, {FILL_ROWS} rows")
        self._found.first_epoch[name] = await self._pass(contestant, prompts, FILL_ROWS, 0)

    async def _epoch_two(
        self, rows: int, repeats: Sequence[Sequence[Prompt]], warm: Sequence[Prompt]
    ) -> RepeatedPasses:
        taking = [each for each in self._contestants if self._takes_part(each, rows)]
        for contestant in taking:  # warms up: compilation, first use of these shapes
            await self._pass(contestant, warm, rows, self._new_seed())
        result = RepeatedPasses(samples=len(repeats[0]) * GROUP)
        for repeat, prompts in enumerate(repeats):
            seed = self._new_seed()
            first = repeat % len(taking)
            for contestant in (*taking[first:], *taking[:first]):
                measured = await self._pass(contestant, prompts, rows, seed)
                result.passes.setdefault(contestant.name, []).append(measured)
        return result

    def _log(self, text: str) -> None:
        """Show the progress of a long run on stderr; the tables go to stdout."""
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)

    def _takes_part(self, contestant: Contestant, rows: int) -> bool:
        return contestant.name != SUFFIX or rows <= self._plan.suffix_rows

    async def _plain_step(self, rows: int) -> float:
        """Seconds of a plain decoding step with this many rows."""
        plain = self._named(PLAIN)
        prompts = self._work.task.train[: -(-rows // GROUP)]
        return (await self._step(plain, prompts, rows, self._new_seed())).seconds_per_step

    async def _overhead(self, prompts: Sequence[Prompt], repeat: int) -> tuple[Pass, Pass]:
        """Steps of the plain and the drafting engine at OVERHEAD_ROWS rows, alternating."""
        pair = [self._named(PLAIN), self._named(OURS)]
        seed = self._new_seed()
        steps = {
            each.name: await self._step(each, prompts, OVERHEAD_ROWS, seed)
            for each in (pair if repeat % 2 == 0 else reversed(pair))
        }
        return steps[PLAIN], steps[OURS]

    async def _step(
        self, contestant: Contestant, prompts: Sequence[Prompt], rows: int, seed: int
    ) -> Pass:
        """Decoding steps alone: the difference between a longer pass and a shorter one."""
        short, long = [
            await self._pass(contestant, prompts, rows, seed, fixed=length, samples=rows)
            for length in STEP_LENGTHS
        ]
        return long - short

    def _named(self, name: str) -> Contestant:
        return next(each for each in self._contestants if each.name == name)

    def _take(self, count: int) -> list[Prompt]:
        taken = list(itertools.islice(self._unseen, count))
        if len(taken) < count:
            raise RuntimeError("the task has too few prompts; measure fewer rows or repeats")
        return taken

    def _new_seed(self) -> int:
        """Passes differ above the lowest 32 bits, so the seeds of their samples do not overlap."""
        return next(self._seeds) << 32

    def _request(
        self, number: int, index: int, prompt: Prompt, seed: int, fixed: int | None
    ) -> GenerateRequest:
        sampling = SamplingParams(
            max_tokens=fixed or self._work.max_tokens,
            stop_tokens=() if fixed else self._work.task.stop_tokens,
            seed=seed,
        )
        name = f"{number}-{index}"
        return GenerateRequest(name, prompt.prompt_id, prompt.tokens, sampling)

    async def _pass(
        self,
        contestant: Contestant,
        prompts: Sequence[Prompt],
        rows: int,
        seed: int,
        *,
        fixed: int | None = None,
        samples: int | None = None,
    ) -> Pass:
        """Generate GROUP samples of each prompt, `rows` at a time."""
        await asyncio.sleep(SETTLE_SECONDS)
        engine, free_rows = contestant.engine, asyncio.Semaphore(rows)
        number = next(self._numbers)

        async def generate(index: int) -> int:
            request = self._request(number, index, prompts[index // GROUP], seed + index, fixed)
            async with free_rows:
                return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

        count = samples or len(prompts) * GROUP
        waiting = [other for other in self._contestants if other is not contestant]
        waiting_before = sum(other.cpu_seconds() for other in waiting)
        before, began = engine.stats(), time.perf_counter()
        try:
            async with asyncio.timeout(PASS_SECONDS):
                tokens = sum(await asyncio.gather(*(generate(index) for index in range(count))))
        except TimeoutError as error:
            raise EngineError(
                f"{contestant.name}: {count} samples, {rows} at a time, were not generated "
                f"within {PASS_SECONDS:.0f} s"
            ) from error
        seconds, after = time.perf_counter() - began, engine.stats()
        return Pass(
            tokens=tokens,
            seconds=seconds,
            steps=after.steps - before.steps,
            drafted=after.tokens.drafted - before.tokens.drafted,
            accepted=after.tokens.accepted - before.tokens.accepted,
            waiting_cpu_seconds=sum(each.cpu_seconds() for each in waiting) - waiting_before,
        )


def _weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files: Iterable[Path] = sorted(directory.glob("*.safetensors"))
    return (item for file in files for item in load_file(file).items())
