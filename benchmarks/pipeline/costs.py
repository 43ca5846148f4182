"""Measure what decoding and scoring cost, and how long responses are, with the runs' torch engine.

    python -m benchmarks.pipeline.costs MODEL      prints one line of JSON

It runs on one core with the slots of `benchmarks/pipeline/pipeline.yaml`. Responses to a number of
prompts are generated, then the same tokens are verified (`GenerateRequest.kept`) under the same
weights, which accept all of them, so that nothing is regenerated. This is done without the cache,
so that decoding is plain, and with it.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import output_of
from benchmarks.pipeline.run import CONFIG

GROUP = 4
"""Samples of each prompt."""
SECONDS = 300.0
"""Longest time that the measurement may take."""


@dataclass(frozen=True)
class Costs:
    """Tokens per second on one core, and lengths in tokens."""

    slots: int
    decoded: float
    """Plain decoding; all slots are in use except near the end."""
    decoded_with_cache: float
    """Decoding with drafts from the samples of the same prompt, as in the runs."""
    scored: float
    """Verification of response tokens."""
    lengths: tuple[float, float, float]
    """Median, 90th percentile, longest."""

    @property
    def ratio(self) -> float:
        """Cost of a decoded token over that of a scored token."""
        return self.scored / self.decoded

    @property
    def ratio_with_cache(self) -> float:
        return self.scored / self.decoded_with_cache


def measure_costs(model: Path, prompts: int, more: Sequence[str] = ()) -> Costs:
    """Measure in a child process that is pinned to one core."""
    command = [sys.executable, "-m", "benchmarks.pipeline.costs", str(model), str(prompts)]
    command += more
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    said = output_of(command, "measuring the engine", SECONDS, env=os.environ | threads)
    found = json.loads(said.splitlines()[-1])
    return Costs(**{**found, "lengths": tuple(found["lengths"])})


async def _measure(model: str, prompts: int, more: Sequence[str]) -> Costs:
    from asyncrl.config.run_config import load_config
    from asyncrl.tasks.loading import load_task

    config = load_config(CONFIG, (f"model.path={model}", f"task.train_size={prompts}", *more))
    task = load_task(config.task, model, 0)
    off, on = (config.cache.model_copy(update={"enabled": enabled}) for enabled in (False, True))
    _, decoded, scored = await _passes(config, task, model, off)
    lengths, decoded_with_cache, _ = await _passes(config, task, model, on)
    median, p90 = (float(np.percentile(lengths, share)) for share in (50, 90))
    spread = (median, p90, float(max(lengths)))
    return Costs(config.engine.slots, decoded, decoded_with_cache, scored, spread)


async def _passes(config: Any, task: Any, model: str, cache: Any) -> tuple[list[int], float, float]:
    """Lengths of the responses, and tokens per second decoded and scored."""
    from asyncrl.engine.factory import create_engine
    from asyncrl.engine.protocol import GenerateRequest
    from asyncrl.rollout.trajectory import SampleId, TrajectoryBuilder
    from asyncrl.tasks.sample_requests import sample_seed

    engine_config = config.engine.model_copy(update={"threads": 1})
    engine = create_engine(engine_config, model, cache_config=cache, seed=0)
    sampling = config.sampling.params(
        stop_tokens=task.stop_tokens,
        stop_rule=None,
        top_k_logprobs=config.engine.top_k_logprobs,
    )

    async def generate(sample: SampleId, kept: Any) -> TrajectoryBuilder:
        prompt = task.train[sample.group]
        builder = TrajectoryBuilder(sample, prompt.prompt_id, np.asarray(prompt.tokens, np.int32))
        purpose = "draw" if kept is None else "verify"
        seed = sample_seed(0, purpose, sample.group, sample.sample)
        request = GenerateRequest(
            request_id=f"{purpose}-{sample}",
            cache_key=prompt.prompt_id,
            prompt_tokens=builder.prompt_tokens,
            sampling=replace(sampling, seed=seed),
            kept=kept,
        )
        async for chunk in engine.generate(request):
            chunk.append_to(builder)
        return builder

    async def timed(
        samples: Sequence[SampleId], kept: Sequence[Any]
    ) -> tuple[list[TrajectoryBuilder], float]:
        began = time.perf_counter()
        made = await asyncio.gather(*(generate(s, k) for s, k in zip(samples, kept, strict=True)))
        return list(made), time.perf_counter() - began

    samples = [SampleId(g, s) for g in range(1, len(task.train)) for s in range(GROUP)]
    await engine.start()
    try:
        await timed([SampleId(0, s) for s in range(GROUP)], [None] * GROUP)  # warms up
        generated, decoding = await timed(samples, [None] * len(samples))
        lengths = [len(builder) for builder in generated]
        _, scoring = await timed(samples, [builder.kept() for builder in generated])
    finally:
        await engine.close()
    return lengths, sum(lengths) / decoding, sum(lengths) / scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", type=int)
    parser.add_argument("more", nargs="*")
    args = parser.parse_args()
    from asyncrl.cores import stay_on

    stay_on(sorted(os.sched_getaffinity(0))[:1])
    costs = asyncio.run(_measure(args.model, args.prompts, args.more))
    print(json.dumps(vars(costs)))


if __name__ == "__main__":
    main()
