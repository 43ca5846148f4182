"""What vLLM is started with, without vLLM."""

from __future__ import annotations

import asyncio
import logging.config
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.vllm.client.engine import VllmCore
from asyncrl.engine.vllm.client.process import prepare, process_log


@pytest.mark.parametrize(("threads", "ranks", "each"), [(8, 4, "2"), (3, 4, "1"), (3, 1, "3")])
def test_ranks_divide_the_threads_of_their_engine(
    monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, each: str
) -> None:
    """Each is a process, and eight with as many threads as cores would get in each other's way."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(logging.config, "dictConfig", lambda _settings: None)
    settings = {"kind": "vllm", "threads": threads, "vllm": {"tensor_parallel_size": ranks}}
    prepare(EngineConfig.model_validate(settings), process_log("ERROR"))
    assert os.environ["OMP_NUM_THREADS"] == each


def test_compiling_what_draws_has_what_is_left_of_the_start() -> None:
    """Not the time of a call: on a GPU it may take longer than a call may."""
    asked: dict[str, float | None] = {}

    async def ask(call: Any, what: str, *, limit: float | None = None) -> Any:
        asked[what] = limit

    llm = SimpleNamespace(
        collective_rpc=lambda name, args: (name, args),
        update_weight_version=lambda version: version,
        get_supported_tasks=list,
    )
    process: Any = SimpleNamespace(ask=ask, vllm=Mock(llm=llm))
    config = EngineConfig(kind="vllm")
    asyncio.run(VllmCore(process).attach(config, 700))
    assert asked["attach to its worker"] == 700
    assert asked["set its weight version"] is None
