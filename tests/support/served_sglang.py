"""Real SGLang in tests, in an interpreter of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked_sglang
import pytest
from served_engine import MAX_LEN, SLOTS, START_DEADLINE, TOP_K, Served, make_model

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.sglang.client import process
from asyncrl.engine.sglang.client.engine import SglangEngine
from asyncrl.engine.sglang.config import SglangConfig, check_interpreter

REAL_SGLANG = [pytest.mark.sglang]
"""The `pytestmark` of modules that run a real engine."""
FAULTY = "faulty_sglang"
"""In the place of `process.MODULE`: SGLang with our scheduler, which can be told to do wrong."""
SUPPORT = str(Path(__file__).parent)


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
def faults_possible(**variables: str) -> Iterator[None]:
    """Engines that start meanwhile can be told to do something wrong (`sglang_faults`).

    Args:
        variables: of their environment.
    """
    paths = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH", "")]))
    changed = variables | {"PYTHONPATH": paths}
    with patch.object(process, "MODULE", FAULTY), forked(), patch.dict(os.environ, changed):
        yield


def forked() -> AbstractContextManager[Any]:
    """Engines that start meanwhile are forked from one process that has imported SGLang."""
    return patch.object(process, "subprocess", forked_sglang)


@contextmanager
def fault(served: Served, kind: str) -> Iterator[None]:
    """A running engine does something wrong meanwhile (`sglang_faults.FaultyCalls`)."""
    set_fault(served, kind)
    try:
        yield
    finally:
        set_fault(served, "none")


def set_fault(served: Served, kind: str) -> None:
    call_worker(served, "asyncrl_fault", kind)


def call_worker(served: Served, method: str, *arguments: Any) -> Any:
    """Call a method of `sglang_faults.FaultyCalls`."""
    return served.call(ask_worker(served.core, method, *arguments))


async def ask_worker(core: Any, method: str, *arguments: Any) -> Any:
    """The same."""

    def named(*_arguments: Any) -> Any: ...

    named.__name__ = method
    (result,) = await core._call(None, "do what a test asks for", named, *arguments)
    return result


@contextmanager
def serving(path: Path, *, kv_cache_gib: float, max_prefill_tokens: int) -> Iterator[Served]:
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
            max_step_tokens=96,
            max_prefill_tokens=max_prefill_tokens,
        ),
    )
    cache = CacheConfig(max_draft_tokens=4, min_match=1, min_probability=0.0, max_bytes=1 << 26)
    with asyncio.Runner() as runner, faults_possible():
        engine = SglangEngine(config, str(path), cache_config=cache, seed=3)
        served = Served(engine, runner, old, new, block=1, processes=lambda: [core_of(engine)])
        try:
            served.call(engine.start(), START_DEADLINE)
            yield served
        finally:
            served.call(engine.close())


def core_of(engine: SglangEngine) -> int:
    """The scheduler process of rank 0."""
    assert engine._parts is not None
    pid: int = engine._parts.core.pid  # type: ignore[attr-defined]
    return pid
