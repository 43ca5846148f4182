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
    """The engine that all modules share."""
    return request.getfixturevalue(f"served_by_{request.param}")
