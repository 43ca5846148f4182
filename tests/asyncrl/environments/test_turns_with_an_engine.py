"""A real engine's turns in a conversation: what is trained on is what the engine drew."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from chat_models import chat_tokenizer, stop_ids
from tiny_models import make_qwen3, save

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.rollout.trajectory import SampleId, TrajectoryBuilder

VOCABULARY = 512
"""More tokens than any of the tokenizers has."""
TURNS = 4
MORE_STOPS = tuple(range(0, 400, 7))
"""A random model rarely draws the one stop token of its template."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = make_qwen3(vocab_size=VOCABULARY, max_position_embeddings=2048, eos_token_id=1)
    return save(model, tmp_path_factory.mktemp("chat"))


async def drawn(engine: Engine, request: GenerateRequest, builder: TrajectoryBuilder) -> list[int]:
    tokens: list[int] = []
    async for chunk in engine.generate(request):
        chunk.append_to(builder)
        tokens += chunk.tokens.tolist()
    return tokens


async def conversation(engine: Engine, name: str) -> None:
    tokenizer, stops = chat_tokenizer(name), (*stop_ids(name), *MORE_STOPS)
    renderer = TurnRenderer(tokenizer, stop_tokens=stops)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 1 + 1?"}]
    builder = TrajectoryBuilder(SampleId(0, 0), name, renderer.prompt(messages))
    turns, between = list[list[int]](), list[list[int]]()
    for turn in range(TURNS):
        request = GenerateRequest(
            request_id=f"{name}-{turn}",
            cache_key=name,
            prompt_tokens=builder.prompt_tokens,
            prefix_tokens=builder.tokens(),
            turn_start=builder.turn_start,
            sampling=SamplingParams(
                max_tokens=len(builder) + 30, stop_tokens=stops, temperature=1.0, seed=7 + turn
            ),
        )
        turns.append(await drawn(engine, request, builder))
        if turn == TURNS - 1:
            break
        answer = [{"role": "user", "content": f"hello there {turn}\n"}]
        between.append(renderer.between(messages, answer, turns[-1]).tolist())
        builder.append_observed(np.asarray(between[-1], np.int32))
        messages += [{"role": "assistant", "content": renderer.turn_text(turns[-1])}, *answer]
    trajectory = builder.finish("stop")
    generated = [*itertools.chain(*turns)]
    assert trajectory.tokens[trajectory.trained].tolist() == generated
    assert trajectory.tokens[~trajectory.trained].tolist() == [*itertools.chain(*between)]
    # The check has teeth: what the model drew does not read back as the same tokens.
    text = tokenizer.decode(generated, skip_special_tokens=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] != generated


def test_trained_tokens_are_those_of_the_engine_for_every_template(model: str) -> None:
    async def scenario() -> None:
        config = EngineConfig(
            kind="torch", slots=4, threads=1, max_model_len=1024, top_k_logprobs=64, device="cpu"
        )
        engine = create_engine(config, model, cache_config=CacheConfig(max_bytes=1 << 20), seed=5)
        await engine.start()
        try:
            names = ("qwen3", "llama31", "mistral_v3", "mistral_tekken", "custom", "plain")
            await asyncio.gather(*(conversation(engine, name) for name in names))
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 400))
