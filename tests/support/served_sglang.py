"""Real SGLang in tests, in an interpreter of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served_engine import MAX_LEN, SLOTS, START_DEADLINE, TOP_K, Served, make_model

from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.sglang.client.engine import SglangEngine
from engine.sglang.config import SglangConfig
from engine.sglang.interpreter import check_interpreter

REAL_SGLANG = [pytest.mark.sglang]
"""The `pytestmark` of modules that run a real engine."""


def sglang_python() -> str:
    """The interpreter: `ASYNCRL_SGLANG_PYTHON`, or the one that `make setup-sglang` makes.

    Raises:
        EngineStartError: there is none, or it lacks something. Nothing is skipped.
    """
    own = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
    python = os.environ.get("ASYNCRL_SGLANG_PYTHON", str(own))
    check_interpreter(SglangConfig(python=python))
    return python


@contextmanager
def serving(
    path: Path, *, kv_cache_gib: float = 0.01, max_prefill_tokens: int = 512
) -> Iterator[Served]:
    """An engine that starts with the first of two policies; drafts of at most 4 tokens."""
    old, new = make_model(1), make_model(2)
    old.save_pretrained(path)
    config = EngineConfig(
        kind="sglang",
        slots=SLOTS,
        max_model_len=MAX_LEN,
        threads=1,
        top_k_logprobs=TOP_K,
        # Drafts in every step: what a test sees must not depend on the clock.
        sglang=SglangConfig(
            python=sglang_python(),
            chunk_tokens=64,  # the tests' responses have several
            kv_cache_gib=kv_cache_gib,
            max_step_tokens=64,
            max_prefill_tokens=max_prefill_tokens,
        ),
    )
    cache = CacheConfig(max_draft_tokens=4, min_match=1, min_probability=0.0, max_bytes=1 << 26)
    with asyncio.Runner() as runner:
        engine = SglangEngine(config, str(path), cache_config=cache, seed=3)
        served = Served(engine, runner, old, new, block=1, processes=lambda: [core_of(engine)])
        try:
            served.call(engine.start(), START_DEADLINE)
            yield served
        finally:
            served.call(engine.close())


@contextmanager
def steadily_timed() -> Iterator[None]:
    """Engines that start in it time their steps with a clock of `steady_clock/sitecustomize.py`."""
    ours = str(Path(__file__).parent / "steady_clock")
    before = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([ours, *([before] if before else [])]))
        yield


def core_of(engine: SglangEngine) -> int:
    """The scheduler process of rank 0."""
    assert engine._parts is not None
    pid: int = engine._parts.core.pid  # type: ignore[attr-defined]
    return pid
