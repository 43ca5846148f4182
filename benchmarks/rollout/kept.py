"""Rollouts one optimizer step later: how many tokens each rule keeps of the same texts.

Texts are generated under version v and never trained on. The torch engine scores them under v + 1.

    ours      `verify_kept`, exact. Kept tokens: the accepted ones, and the one that the rule draws
              in place of the first rejected token, which need not be generated.
    SPEC-RL   `accept_lenient` at l = 1 (and at e^0.5, for information), biased. Kept tokens: the
              accepted ones. It draws nothing; its engine generates from there.

Both rules get the same texts and the same uniforms. The result is a mean over many sets of
uniforms.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from asyncrl.tasks.prompts import Prompt, Task
from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.factory import create_engine
from engine.protocol import Engine, GenerateRequest, SamplingParams, Score, ScoreRequest
from rollout.acceptance import TopKDistributions, accept_lenient, verify_kept
from rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
from wire.weights.writer import published

_SAMPLES = 8
_DRAWS = 32
"""Number of sets of uniforms."""


async def kept_tokens(
    earlier: Path, later: Path, task: Task, prompts: Sequence[Prompt], max_tokens: int
) -> dict[str, float]:
    """Mean kept tokens per text of each rule, and `verify_kept_vs_specrl`.

    Args:
        earlier: HF directory of version v, not widened.
        later: HF directory of version v + 1.
        task: provides the stop tokens.
        prompts: 8 texts are generated for each.
        max_tokens: most tokens of a text.
    """
    config = EngineConfig(slots=64, max_model_len=128)
    engine = create_engine(config, str(earlier), cache_config=CacheConfig(enabled=False), seed=0)
    sampling = SamplingParams(max_tokens=max_tokens, stop_tokens=task.stop_tokens)
    await engine.start()
    try:
        texts = await asyncio.gather(
            *(
                _generate(engine, prompt, SampleId(group, sample), sampling)
                for group, prompt in enumerate(prompts)
                for sample in range(_SAMPLES)
            )
        )
        weights = load_file(later / "model.safetensors")
        with published(weights.items(), 1) as manifest:
            await engine.stage_weights(manifest)
        await engine.install_weights(1)
        scores = await engine.score(
            [ScoreRequest(str(t.id), t.prompt_tokens, t.tokens, sampling) for t in texts]
        )
    finally:
        await engine.close()
    return compare(texts, scores, np.random.default_rng(0))


def compare(
    texts: Sequence[Trajectory], scores: Sequence[Score], rng: np.random.Generator
) -> dict[str, float]:
    """The tokens that each rule keeps of texts scored under the newer policy."""
    offsets = np.concatenate([[0], np.cumsum([len(text.tokens) for text in texts])])
    drawn, now = (
        TopKDistributions.concatenate([text.kept() for text in texts]),
        TopKDistributions.concatenate(scores),
    )
    tokens = np.concatenate([text.tokens for text in texts])
    kept = dict.fromkeys(("ours", "ours_token_by_token", "specrl_l1", "specrl_e05"), 0.0)
    accepted = 0.0
    for _ in range(_DRAWS):
        uniforms = rng.random((len(tokens), 2))
        for name, block in (("ours", True), ("ours_token_by_token", False)):
            result = verify_kept(
                tokens,
                drawn,
                now,
                tail_ids=np.concatenate([score.tail_ids for score in scores]),
                tail_logprobs=np.concatenate([score.tail_logprobs for score in scores]),
                offsets=offsets,
                uniforms=uniforms,
                block=block,
            )
            kept[name] += float(result.accepted.sum() + (result.token >= 0).sum())
            accepted += float(result.accepted.sum()) if block else 0.0
        for name, lenience in (("specrl_l1", 1.0), ("specrl_e05", math.exp(0.5))):
            kept[name] += float(
                accept_lenient(
                    drawn.logprobs, now.logprobs, offsets, uniforms[:, 0], lenience
                ).sum()
            )
    texts_drawn = _DRAWS * len(texts)
    found = {f"{name}_tokens_per_text": total / texts_drawn for name, total in kept.items()}
    return found | {
        "ours_accepted_only_tokens_per_text": accepted / texts_drawn,
        "tokens_per_text": len(tokens) / len(texts),
        "texts": float(len(texts)),
        "verify_kept_vs_specrl": kept["ours"] / kept["specrl_l1"],
        "verify_kept_vs_specrl_e05": kept["ours"] / kept["specrl_e05"],
        "verify_kept_token_by_token_vs_specrl": kept["ours_token_by_token"] / kept["specrl_l1"],
        "verify_accepted_only_vs_specrl": accepted / kept["specrl_l1"],
    }


async def _generate(
    engine: Engine, prompt: Prompt, name: SampleId, sampling: SamplingParams
) -> Trajectory:
    request = GenerateRequest(str(name), "", prompt.tokens, sampling)
    builder = TrajectoryBuilder(name, prompt.prompt_id, prompt.tokens)
    async for chunk in engine.generate(request):
        chunk.append_to(builder)
    return builder.finish("stop")
