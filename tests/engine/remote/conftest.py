"""Tests of this folder that ask for `served` run on real vLLM and on real SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from served_sglang import REAL_SGLANG
from served_vllm import REAL_VLLM

EACH_ENGINE = [
    pytest.param("vllm", marks=REAL_VLLM),
    pytest.param("sglang", marks=REAL_SGLANG),
]


@pytest.fixture(scope="session", params=EACH_ENGINE)
def served(request: pytest.FixtureRequest) -> Any:
    """A `served_engine.Served` with KV space for all slots, where the engine has such a one."""
    return request.getfixturevalue(f"served_by_{request.param}")


@pytest.fixture(scope="session", params=EACH_ENGINE)
def served_in_small_kv(request: pytest.FixtureRequest) -> Any:
    """One that has less, and takes long prompts in by parts."""
    return request.getfixturevalue(f"served_by_{request.param}_in_small_kv")
