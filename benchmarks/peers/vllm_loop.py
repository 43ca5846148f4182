"""A plain synchronous loop on vLLM: what a user would write without asyncrl's pipeline.

    python -m benchmarks.peers.vllm_loop CONFIG LOG [--threads N] [--set KEY=VALUE ...]

Generate all samples of a step, score them, take one optimizer step, give the engine the new
weights. Engine and learner are asyncrl's own, so the difference to its other modes is the loop.
Drafting is off: a vLLM that is able to draft is not the fastest plain one.

Heavy imports are inside functions, because vLLM's core process imports this module again
(`benchmarks.rollout.run`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any


async def train(options: argparse.Namespace) -> None:
    from asyncrl.config.run_config import load_config
    from asyncrl.engine.factory import create_engine
    from asyncrl.trainer.learner import Learner
    from asyncrl.wire.weights.layout import SHARED_MEMORY
    from asyncrl.wire.weights.writer import WeightPublisher
    from benchmarks.peers.shared_data import StepLog, mean, prompts_by_step, reward_of, task_of

    config = load_config(options.config, tuple(options.settings))
    task, reward, path = task_of(config), reward_of(config), config.model.path
    sampling = config.sampling.params(
        stop_tokens=task.stop_tokens, stop_rule=None, top_k_logprobs=0, seed=None
    )
    learner = Learner(
        config.trainer.model_copy(update={"threads": options.threads}),
        path,
        group_size=config.scheduler.group_size,
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        truncation=sampling.truncation,
        total_steps=config.run.steps,
    )
    engine = create_engine(
        config.engine.model_copy(update={"kind": "vllm", "threads": options.threads}),
        path,
        cache_config=config.cache.model_copy(update={"enabled": False}),
        seed=config.run.seed,
    )
    log = StepLog(options.log)
    steps = list(prompts_by_step(config, task, learner.policy.model))
    await engine.start()
    try:
        with WeightPublisher(SHARED_MEMORY, f"peers-{os.getpid()}") as publisher:
            log.begin()
            for step, prompts in enumerate(steps):
                groups = await _generate(engine, config, sampling, prompts, step)
                values = []
                for prompt, group in zip(prompts, groups, strict=True):
                    texts = [task.tokenizer.decode(one.tokens.tolist()) for one in group]
                    scores = [reward(prompt, text) for text in texts]
                    learner.add_group(group, scores)
                    values += scores
                learner.step()
                version = step + 1
                await engine.stage_weights(publisher.publish(learner.tensors(), version))
                await engine.install_weights(version)
                log.add(mean(values), sum(len(one.tokens) for group in groups for one in group))
    finally:
        await engine.close()


async def _generate(
    engine: Any, config: Any, sampling: Any, prompts: list[Any], step: int
) -> list[list[Any]]:
    """All samples of a step, by group."""
    from asyncrl.engine.protocol import GenerateRequest
    from asyncrl.rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
    from asyncrl.tasks.sample_requests import sample_seed

    async def one(prompt: Any, group: int, index: int) -> Trajectory:
        sample = SampleId(group, index)
        builder = TrajectoryBuilder(sample, prompt.prompt_id, prompt.tokens)
        seed = sample_seed(config.run.seed, "training", group, index)
        request = GenerateRequest(
            f"{sample}", prompt.prompt_id, prompt.tokens, replace(sampling, seed=seed)
        )
        async for chunk in engine.generate(request):
            chunk.append_to(builder)
            reason = chunk.finish_reason
        return builder.finish(reason)

    size, first = config.scheduler.group_size, step * len(prompts)
    groups = (
        asyncio.gather(*(one(prompt, first + at, index) for index in range(size)))
        for at, prompt in enumerate(prompts)
    )
    return list(await asyncio.gather(*groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="of the engine and of the learner")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
