"""Real vLLM in tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from served_engine import MAX_LEN, SLOTS, START_DEADLINE, TOP_K, Served, make_model

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.vllm.client.engine import VllmEngine
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.learner import Learner

REAL_VLLM = [
    pytest.mark.vllm,
    # vLLM 0.32.0 itself, on import and when it looks through all modules for kernels to replace.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*distributed.reduce_op.*:FutureWarning"),
]
"""The `pytestmark` of modules that run a real engine."""
EXTENSION = "asyncrl.engine.vllm.client.launch.EXTENSION_PATH"
FAULTY = "faulty_worker.FaultyWorker"
"""Our worker extension, which can also be told to do something wrong, and be timed."""


@contextmanager
def serving(
    path: Path,
    *,
    kv_cache_gib: float = 0.25,
    max_prefill_tokens: int = 4096,
    tensor_parallel_size: int = 1,
    lora_rank: int = 0,
) -> Iterator[Served]:
    """An engine that starts with the first of two policies; drafts of at most 4 tokens.

    It loads the first one as `asyncrl export` writes it.
    """
    old, new = make_model(1), make_model(2)
    path = exported(old, path)
    config = EngineConfig(
        kind="vllm",
        slots=SLOTS,
        max_model_len=MAX_LEN,
        threads=1,
        top_k_logprobs=TOP_K,
        # Drafts in every step: what a test sees must not depend on the clock.
        vllm=VllmConfig(
            chunk_tokens=64,  # the tests' responses have several
            kv_cache_gib=kv_cache_gib,
            max_step_tokens=96,
            max_prefill_tokens=max_prefill_tokens,
            tensor_parallel_size=tensor_parallel_size,
        ).with_adapter(lora_rank),
    )
    cache = CacheConfig(max_draft_tokens=4, min_match=1, min_probability=0.0, max_bytes=1 << 26)
    with asyncio.Runner() as runner, patch(EXTENSION, FAULTY):
        engine = VllmEngine(config, str(path), cache_config=cache, seed=3)
        served = Served(engine, runner, old, new, block=128, processes=lambda: processes_of(engine))
        try:
            preloaded = os.environ.get("LD_PRELOAD")
            served.call(engine.start(), START_DEADLINE)
            assert os.environ.get("LD_PRELOAD") == preloaded, "what this process starts gets it"
            yield served
        finally:
            served.call(engine.close())


def exported(model: Any, path: Path) -> Path:
    """A model as it is after it was a run's, saved in a checkpoint, and exported."""
    model.save_pretrained(path / "start")
    learner = Learner(TrainerConfig(device="cpu"), str(path / "start"), group_size=4, seed=1)
    learner.fingerprint(torch.bfloat16)
    learner.save(path / "step-000000")
    export(path / "step-000000", path / "exported")
    return path / "exported"


def processes_of(engine: VllmEngine) -> list[int]:
    """The engine core's."""
    children = engine._process.vllm.llm.engine_core.resources.engine_manager.processes
    return [child.pid for child in children]
