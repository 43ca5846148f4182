"""How benchmarks.rollout times: passes in turns, on prompts that only epoch 1 has seen before.

    epoch 1   under the earlier policy version, every engine that remembers writes GROUP samples of
              every prompt, FILL_ROWS at a time: its cache is filled as in training. Not timed.
    update    all engines, the plain one too, take the later version's weights
    epoch 2   per number of rows and repeat: fresh prompts, the same ones and the same seeds for all
              contestants, one after the other; who goes first changes with each repeat

Requests are served ROWS at a time in the order of the prompts, so the samples of a prompt follow
each other, and in epoch 2 a drafter may also learn from siblings: that is how groups come in
training, and it holds for every drafter. A pass ends when its last request does; with more than
one row the last few run with fewer rows beside them, for every contestant alike.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from asyncrl.tasks.prompts import Prompt, Task
from benchmarks.rollout.contestants import OURS, PLAIN, SUFFIX, Contestant
from benchmarks.rollout.findings import Kind, Pass, Rows
from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams
from wire.weights.writer import published

GROUP = 8
"""Samples of one prompt, as in training."""
FILL_ROWS = 32
PASS_SECONDS = 600.0
"""Longest wait for one pass."""
SETTLE_SECONDS = 0.25
"""Between passes, so that threads of the side that was just timed have gone to sleep."""
OVERHEAD_ROWS = 64
STEP_LENGTHS = (8, 32)
"""Tokens per row of the two passes whose difference is the time of a decode step: no prompt and no
end of a response is in it (the shortest response has 42 tokens)."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rows: tuple[int, ...]
    """Requests at a time."""
    repeats: int
    suffix_rows: int = 1 << 30
    """vLLM's own drafter takes part up to so many rows."""
    step_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Rows at which the time of a plain step is measured; () for none."""
    overhead_repeats: int = 5

    def groups(self, rows: int) -> int:
        """Prompts of a pass: 4 samples a row up to 8 rows, 2 above."""
        return max(1, -(-(4 if rows <= 8 else 2) * rows // GROUP))


@dataclass(frozen=True)
class Workload:
    """What is written, under which weights."""

    task: Task
    max_tokens: int
    earlier: Path
    """HF directory of the version that writes epoch 1."""
    later: Path
    """Of the version that everything is timed under."""


class Bench:
    """One kind of engine and all its contestants."""

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
        """Start everything, fill the caches, update the weights, measure.

        Raises:
            EngineError: an engine could not start, failed, or took too long.
        """
        try:
            for contestant in self._contestants:
                self._say(f"starting {contestant.name}")
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
        for one in self._contestants:
            if one.remembers:
                wanted = [
                    *(g for r in plan.rows if self._takes_part(one, r) for g in prompts[r]),
                    *([warm, crowd] if one.name != SUFFIX else [warm]),
                ]
                await self._fill(one, [p for group in wanted for p in group])
        with published(_weights(self._work.later), 1) as manifest:
            for one in self._contestants:
                await one.engine.stage_weights(manifest)
        for one in self._contestants:
            await one.engine.install_weights(1)
        for rows in plan.rows:
            self._say(f"epoch 2, {rows} rows")
            self._found.rows[rows] = at = await self._epoch_two(rows, prompts[rows], warm)
            self._say(", ".join(f"{name} {at.rate(name):,.0f} tokens/s" for name in at.passes))
        self._say("steps alone")
        for rows in plan.step_rows:
            self._found.steps[rows] = await self._plain_step(rows)
        for repeat in range(plan.overhead_repeats):
            self._found.overhead.append(await self._overhead(crowd, repeat))

    async def _fill(self, one: Contestant, prompts: Sequence[Prompt]) -> None:
        """Epoch 1 of one contestant; all of them draw with the same seeds."""
        self._say(f"epoch 1 of {one.name}: {len(prompts)} prompts, {FILL_ROWS} rows")
        self._found.first_epoch[one.name] = await self._pass(one, prompts, FILL_ROWS, 0)

    async def _epoch_two(
        self, rows: int, repeats: Sequence[Sequence[Prompt]], warm: Sequence[Prompt]
    ) -> Rows:
        taking = [one for one in self._contestants if self._takes_part(one, rows)]
        for one in taking:  # compilation, first touches of this shape
            await self._pass(one, warm, rows, self._new_seed())
        result = Rows(samples=len(repeats[0]) * GROUP)
        for repeat, prompts in enumerate(repeats):
            seed = self._new_seed()
            first = repeat % len(taking)
            for one in (*taking[first:], *taking[:first]):
                written = await self._pass(one, prompts, rows, seed)
                result.passes.setdefault(one.name, []).append(written)
        return result

    def _say(self, what: str) -> None:
        """On stderr, so that a long run can be followed; the tables go to stdout."""
        print(f"[{time.monotonic() - self._began:5.0f} s] {what}", file=sys.stderr, flush=True)

    def _takes_part(self, one: Contestant, rows: int) -> bool:
        return one.name != SUFFIX or rows <= self._plan.suffix_rows

    async def _plain_step(self, rows: int) -> float:
        """Seconds of a plain decode step with so many rows."""
        plain = self._named(PLAIN)
        prompts = self._work.task.train[: -(-rows // GROUP)]
        return (await self._step(plain, prompts, rows, self._new_seed())).seconds_per_step

    async def _overhead(self, prompts: Sequence[Prompt], repeat: int) -> tuple[Pass, Pass]:
        """Steps of the plain and of the drafting engine at OVERHEAD_ROWS rows, in turns."""
        pair = [self._named(PLAIN), self._named(OURS)]
        seed = self._new_seed()
        steps = {
            one.name: await self._step(one, prompts, OVERHEAD_ROWS, seed)
            for one in (pair if repeat % 2 == 0 else reversed(pair))
        }
        return steps[PLAIN], steps[OURS]

    async def _step(self, one: Contestant, prompts: Sequence[Prompt], rows: int, seed: int) -> Pass:
        """Decode steps alone: what a longer pass takes beyond a shorter one."""
        short, long = [
            await self._pass(one, prompts, rows, seed, fixed=length, samples=rows)
            for length in STEP_LENGTHS
        ]
        return long - short

    def _named(self, name: str) -> Contestant:
        return next(one for one in self._contestants if one.name == name)

    def _take(self, count: int) -> list[Prompt]:
        taken = list(itertools.islice(self._unseen, count))
        if len(taken) < count:
            raise RuntimeError("the task has too few prompts: fewer rows or repeats, please")
        return taken

    def _new_seed(self) -> int:
        """Seeds of different passes do not overlap: they differ above the lowest 32 bits."""
        return next(self._seeds) << 32

    async def _pass(
        self,
        one: Contestant,
        prompts: Sequence[Prompt],
        rows: int,
        seed: int,
        *,
        fixed: int | None = None,
        samples: int | None = None,
    ) -> Pass:
        """Write GROUP samples of each prompt, `rows` at a time.

        Args:
            one: who writes.
            prompts: in this order.
            rows: requests at a time.
            seed: sample i draws with seed + i.
            fixed: every sample has so many tokens, whatever it says.
            samples: so many in all; default GROUP per prompt.
        """
        await asyncio.sleep(SETTLE_SECONDS)
        number, engine, room = next(self._numbers), one.engine, asyncio.Semaphore(rows)
        sampling = {
            "max_tokens": fixed or self._work.max_tokens,
            "stop_tokens": () if fixed else self._work.task.stop_tokens,
        }

        async def write(index: int) -> int:
            prompt = prompts[index // GROUP]
            request = GenerateRequest(
                request_id=f"{number}-{index}",
                cache_key=prompt.prompt_id,
                prompt_tokens=prompt.tokens,
                sampling=SamplingParams(**sampling, seed=seed + index),  # type: ignore[arg-type]
            )
            async with room:
                return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

        count = samples or len(prompts) * GROUP
        sleeping = [other for other in self._contestants if other is not one]
        burnt = sum(other.cpu_seconds() for other in sleeping)
        before, began = engine.stats(), time.perf_counter()
        try:
            async with asyncio.timeout(PASS_SECONDS):
                tokens = sum(await asyncio.gather(*(write(index) for index in range(count))))
        except TimeoutError as error:
            raise EngineError(
                f"{count} samples, {rows} at a time, were not written within {PASS_SECONDS:.0f} s"
            ) from error
        seconds, after = time.perf_counter() - began, engine.stats()
        return Pass(
            tokens=tokens,
            seconds=seconds,
            steps=after.steps - before.steps,
            drafted=after.tokens.drafted - before.tokens.drafted,
            accepted=after.tokens.accepted - before.tokens.accepted,
            asleep_cpu=sum(other.cpu_seconds() for other in sleeping) - burnt,
        )


def _weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files: Iterable[Path] = sorted(directory.glob("*.safetensors"))
    return (item for file in files for item in load_file(file).items())
