"""Real SGLang with drafts: the same tokens as without, and the enumerated distribution.

An engine of its own: its steps overlap, as on GPUs (one is launched before SGLang has processed the
one before), which the engine's settings leave out on a CPU, and its clock is steady.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from false_alarms import Claims
from numpy.typing import NDArray
from scipy.stats import chisquare
from served_sglang import (
    REAL_SGLANG,
    ask_worker,
    faults_possible,
    sglang_python,
)
from tiny_models import STOP, VOCAB, make_qwen3, save

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.sglang.client.engine import SglangEngine
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.rollout.trajectory import IntArray

pytestmark = [*REAL_SGLANG, pytest.mark.slow]

OVERLAPPING_AND_STEADY = {"ASYNCRL_TEST_OVERLAP": "1", "ASYNCRL_TEST_STEADY_CLOCK": "1"}
CLAIMS = Claims(__file__)
SECONDS = 400.0
PROMPT = np.array([1, 2], np.int32)
WAYS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 6, "min_p": 0.1},
    {"temperature": 0.9, "stop_tokens": (STOP,)},
]


@dataclass
class World:
    engine: SglangEngine
    runner: asyncio.Runner
    model: Any

    def generate(self, requests: list[GenerateRequest]) -> list[tuple[IntArray, NDArray[Any]]]:
        """Tokens and log-probabilities of all, which run together."""

        async def one(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in self.engine.generate(request)]

        async def all_of_them() -> list[list[TokenChunk]]:
            return await asyncio.gather(*map(one, requests))

        return [
            (
                np.concatenate([chunk.tokens for chunk in chunks]),
                np.concatenate([chunk.logprobs for chunk in chunks]),
            )
            for chunks in self.runner.run(asyncio.wait_for(all_of_them(), SECONDS))
        ]

    @property
    def accepted(self) -> int:
        assert self.engine._parts is not None
        return int(self.engine._parts.core.meter.accepted)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Steps seem to take one time, so the planner drafts all it can once it knows that time.

    KV is there for a half of what the requests below want: some are retracted.
    """
    model = make_qwen3()
    path = save(model, Path(tmp_path_factory.mktemp("model")))
    config = EngineConfig(
        kind="sglang",
        slots=16,
        max_model_len=190,
        threads=1,
        top_k_logprobs=4,
        sglang=SglangConfig(python=sglang_python(), kv_cache_gib=0.0003, max_prefill_tokens=32),
    )
    cache = CacheConfig(max_draft_tokens=6, min_match=1, min_probability=0.0)
    with asyncio.Runner() as runner, faults_possible(**OVERLAPPING_AND_STEADY):
        engine = SglangEngine(config, path, cache_config=cache, seed=1)
        try:
            runner.run(asyncio.wait_for(engine.start(), SECONDS))
            assert engine._parts is not None
            assert runner.run(ask_worker(engine._parts.core, "asyncrl_overlaps"))
            yield World(engine, runner, model)
        finally:
            runner.run(engine.close())


def ask(name: str, key: str, seed: int, prompt: IntArray, **how: Any) -> GenerateRequest:
    sampling = SamplingParams(how.pop("max_tokens", 130), seed=seed, top_k_logprobs=4, **how)
    return GenerateRequest(name, key, prompt, sampling)


def test_a_seed_generates_the_same_tokens_with_drafts_and_without(world: World) -> None:
    """Through chunks of prompts and retractions as well; only requests with a key draft."""
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(0, STOP, 50 if i % 5 == 0 else 1 + i % 7).astype(np.int32) for i in range(20)
    ]

    def requests(turn: int, key: str) -> list[GenerateRequest]:
        return [
            ask(f"{turn}.{i}", key and f"{key}{i % 3}", i, prompt, **WAYS[i % len(WAYS)])
            for i, prompt in enumerate(prompts)
        ]

    plain = world.generate(requests(0, ""))
    assert world.accepted == 0
    for turn in (1, 2):  # drafts from siblings, then from the same texts too
        before = world.accepted
        drafted = world.generate(requests(turn, "k"))
        for (tokens, logprobs), (expected, reference) in zip(drafted, plain, strict=True):
            assert tokens.tolist() == expected.tolist()
            np.testing.assert_allclose(logprobs, reference, atol=2e-5)
        accepted = world.accepted - before
        assert accepted > (turn - 1) * 0.6 * sum(len(tokens) for tokens, _ in plain)


def test_a_second_round_of_prompts_is_drafted_though_every_step_is_followed_by_another(
    world: World,
) -> None:
    """The planner learns the time of steps whatever SGLang does between them."""

    def round_of(name: str) -> list[GenerateRequest]:
        prompts = [np.array([i, 3], np.int32) for i in range(4)]
        return [ask(f"{name}{i}", f"s{i}", 9 + i, one) for i, one in enumerate(prompts)]

    first = world.generate(round_of("first"))
    before = world.accepted
    second = world.generate(round_of("second"))
    assert [tokens.tolist() for tokens, _ in second] == [tokens.tolist() for tokens, _ in first]
    assert world.accepted - before > 0.6 * sum(len(tokens) for tokens, _ in second)


@torch.no_grad()
def enumerated(model: Any, length: int) -> NDArray[np.float64]:
    """`[V ** length]` probability of each response, in lexicographic order."""
    responses = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    prompts = torch.from_numpy(PROMPT.astype(np.int64)).expand(len(responses), -1)
    logprobs = model(torch.cat([prompts, responses], 1)).logits.double().log_softmax(-1)
    at = torch.arange(len(PROMPT) - 1, len(PROMPT) - 1 + length)
    chosen = logprobs[:, at].gather(-1, responses[..., None])[..., 0]
    found: NDArray[np.float64] = chosen.sum(-1).exp().numpy()
    return found


def test_drafted_responses_follow_the_enumerated_distribution(world: World) -> None:
    before, n = world.accepted, 1500  # twins in SGLang's own rule had p < 1e-100, twice
    found = world.generate(
        [ask(f"e{i}", "pairs", (1 << 32) + i, PROMPT, max_tokens=3) for i in range(n)]
    )
    assert world.accepted - before > n / 10
    texts = np.stack([tokens for tokens, _ in found])
    expected = enumerated(world.model, 3)
    counts = np.bincount(np.ravel_multi_index(tuple(texts.T), (VOCAB,) * 3), minlength=VOCAB**3)
    rare = expected * n < 6
    counts = np.append(counts[~rare], counts[rare].sum())
    want = np.append(expected[~rare], expected[rare].sum())
    assert CLAIMS.fit(chisquare(counts, want * n).pvalue)
