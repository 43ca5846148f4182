"""Our requests in vLLM's terms, and an engine that cannot start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.client.generation import generation
from asyncrl.engine.vllm.client.engine import VllmEngine
from asyncrl.engine.vllm.remote import from_extra_args, to_extra_args
from asyncrl.engine.vllm.worker.sampling import entry_of


def test_the_worker_reads_what_the_client_sends() -> None:
    prompt, prefix = np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)
    sampling = SamplingParams(max_tokens=9, stop_tokens=(7,), top_k=3)
    request = GenerateRequest("r", "tree", prompt, sampling, prefix, np.array([6], np.int32))
    submitted = generation(request, 5)
    params = SimpleNamespace(
        max_tokens=submitted.max_tokens,
        temperature=submitted.temperature,
        top_p=submitted.top_p,
        stop_token_ids=list(submitted.stop_tokens),
        extra_args=to_extra_args(submitted.extra),
    )
    entry = entry_of(SimpleNamespace(prompt_token_ids=submitted.tokens, sampling_params=params))
    assert entry.context.tolist() == [1, 2, 3, 4, 5]
    assert (entry.extra.seed, entry.start, entry.limit, entry.stop_tokens) == (5, 2, 11, (7,))
    assert (entry.sampling.top_k, entry.extra.draft.tolist()) == (3, [6])
    with pytest.raises(KeyError):
        from_extra_args(None)


def test_a_directory_without_a_model_ends_the_start(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", slots=2, max_model_len=16)

    async def scene() -> None:
        engine = VllmEngine(config, str(tmp_path), cache_config=CacheConfig(), seed=0)
        with pytest.raises(EngineError, match="not started"):
            await engine.score([])
        for what in (engine.start, engine.pause):
            with pytest.raises(EngineError, match=str(tmp_path)):
                await what()
        await engine.close()
        await engine.close()

    asyncio.run(scene())
