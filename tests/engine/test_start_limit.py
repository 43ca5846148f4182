"""An engine's limit of its own start follows that of its process (launcher.startup_seconds)."""

from __future__ import annotations

import os

import pytest

from asyncrl.config.run_config import RunConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.vllm.client.process import prepare, process_log
from asyncrl.engine.vllm.config import VllmConfig


def test_vllm_gives_up_before_its_process_is_killed() -> None:
    """Its own default is 600 s; it must not be below that."""
    assert 600 < VllmConfig().start_limit < RunConfig().launcher.startup_seconds
    assert VllmConfig().started_within(1000).start_limit == 900


def test_sglangs_limit_follows_too() -> None:
    config = EngineConfig(kind="sglang").started_within(1000)
    assert (config.start_limit, config.vllm.start_limit) == (900, 900)
    assert EngineConfig(kind="torch").started_within(1000).start_limit is None


def test_vllm_is_told_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    config = EngineConfig(vllm=VllmConfig().started_within(4000))
    prepare(config, process_log(config.vllm.log_level))  # vLLM's loggers keep this file open
    assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
