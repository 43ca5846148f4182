"""What the torch engine itself keeps of texts that it generated under an earlier policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams
from asyncrl.rollout.trajectory import IntArray, KeptTokens, Provenance, SampleId, TrajectoryBuilder
from asyncrl.wire.weights.writer import published


@dataclass(frozen=True)
class Job:
    texts: int
    length: int
    """Tokens of each text; no token ends one."""
    k: int
    """`engine.top_k_logprobs`"""
    temperature: float = 1.0
    repeats: int = 4
    """Verifications of every text, each with its own random numbers."""


@dataclass(frozen=True)
class EngineShare:
    """Texts of the earlier policy, and what verification under the later one keeps."""

    texts: list[tuple[IntArray, IntArray]]
    """Prompt and response of each."""
    kept: list[int]
    """Kept tokens of each verification."""
    share: float
    """Of all tokens."""
    outside: float
    """Share of the tokens that were drawn outside their list."""


async def measure(earlier: Path, later: Path, prompts: Sequence[IntArray], job: Job) -> EngineShare:
    """Generate under one policy, install the next, verify."""
    longest = max(map(len, prompts)) + job.length + 1
    config = EngineConfig(slots=64, max_model_len=longest, top_k_logprobs=job.k)
    engine = create_engine(config, str(earlier), cache_config=CacheConfig(enabled=False), seed=0)
    chosen = [prompts[index % len(prompts)] for index in range(job.texts)]
    await engine.start()
    try:
        drawn = await asyncio.gather(
            *(_generate(engine, prompt, index, job) for index, prompt in enumerate(chosen))
        )
        with published(load_file(later / "model.safetensors").items(), 1) as manifest:
            await engine.stage_weights(manifest)
        await engine.install_weights(1)
        kept: list[int] = []
        for repeat in range(job.repeats):
            first_seed = job.texts * (repeat + 1)
            kept += await asyncio.gather(
                *(
                    _verify(engine, prompt, tokens, first_seed + index, job)
                    for index, (prompt, tokens) in enumerate(zip(chosen, drawn, strict=True))
                )
            )
    finally:
        await engine.close()
    outside = [(one.topk_ids != one.tokens[:, None]).all(axis=1).mean() for one in drawn]
    return EngineShare(
        texts=[(prompt, one.tokens) for prompt, one in zip(chosen, drawn, strict=True)],
        kept=kept,
        share=sum(kept) / (job.repeats * job.texts * job.length),
        outside=float(np.mean(outside)),
    )


def _request(
    prompt: IntArray, seed: int, job: Job, kept: KeptTokens | None = None
) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=job.length + (kept is not None),
        temperature=job.temperature,
        seed=seed,
        top_k_logprobs=job.k,
    )
    return GenerateRequest(str(seed), "", prompt, sampling, kept=kept)


async def _generate(engine: Engine, prompt: IntArray, seed: int, job: Job) -> KeptTokens:
    builder = TrajectoryBuilder(SampleId(seed, 0), "", prompt)
    async for chunk in engine.generate(_request(prompt, seed, job)):
        chunk.append_to(builder)
    return builder.kept()


async def _verify(engine: Engine, prompt: IntArray, kept: KeptTokens, seed: int, job: Job) -> int:
    """Kept tokens that stay; what is generated after them is not waited for."""
    stream = engine.generate(_request(prompt, seed, job, kept))
    async for chunk in stream:
        if len(chunk.tokens):
            await stream.aclose()  # type: ignore[attr-defined]
            return int((chunk.provenance == Provenance.VERIFIED).sum())
    raise AssertionError("an engine reports the first tokens of every request")
