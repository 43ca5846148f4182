"""Real vLLM engines, each started once for all test modules that ask for it (half a minute)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_vllm import Served, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """KV space for all slots; prompts are taken in whole. `test_vllm_process_death` ends it."""
    with serving(tmp_path_factory.mktemp("vllm-model")) as running:
        yield running


@pytest.fixture(scope="session")
def served_in_small_kv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """32 blocks of 128 tokens, where 16 responses of 390 tokens would need 64: vLLM preempts.

    Prompts longer than 128 tokens are taken in by parts.
    """
    path = tmp_path_factory.mktemp("vllm-small-kv")
    with serving(path, kv_cache_gib=0.002, max_prefill_tokens=128) as running:
        yield running
