"""The torch engine without a cache: a response is still drafted from its own earlier text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.worker.drafting import FixedBudget
from asyncrl.rollout.trajectory import IntArray


def test_without_a_cache_a_response_is_drafted_from_its_earlier_text(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what verification rejected is regenerated fast, too. Nothing else is drafted."""
    # The usual planner drafts where the steps that it has timed say that it pays.
    monkeypatch.setattr("asyncrl.engine.torch.core.DraftPlanner", FixedBudget)

    async def main() -> None:
        config = EngineConfig(slots=4, max_model_len=64, threads=1, top_k_logprobs=4, device="cpu")
        without = CacheConfig(enabled=False)
        engine = create_engine(config, tiny_qwen3, cache_config=without, seed=5)
        await engine.start()

        async def generate(asked: GenerateRequest) -> IntArray:
            chunks = [chunk.tokens async for chunk in engine.generate(asked)]
            return np.concatenate(chunks).astype(np.int32)

        params = SamplingParams(seed=3, max_tokens=40, top_k_logprobs=4)
        asked = GenerateRequest("a", "p", np.array([1, 2, 3], np.int32), params)
        first = await generate(asked)
        assert engine.stats().tokens.drafted == 0
        second = await generate(replace(asked, request_id="b", draft_tokens=first))
        assert second.tolist() == first.tolist()
        assert engine.stats().tokens.accepted > 10
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60.0))
