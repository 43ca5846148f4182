"""CUDA graphs that fit our steps, advice on the drafter, and which modules import vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.engine.vllm.client.engine import advice_on_drafting
from asyncrl.engine.vllm.config import capture_sizes, graph_config
from asyncrl.wire.records.step import EngineStats, TokenCounts

ENGINE = Path(__file__).parents[3] / "engine"
CONTACT = {
    "factory.py",  # only whether it is installed
    "vllm/cpu_sampling.py",  # what it mends, as vLLM's plugin
    "vllm/client/api.py",
    "vllm/worker/api.py",
}


@pytest.mark.parametrize("largest", [1, 3, 64, 256, 300, 512, 1024, 3000])
def test_any_step_fits_a_graph_with_little_padding(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for tokens in range(1, largest + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded <= tokens + max(7, tokens // 8)


def test_drafts_of_any_lengths_need_piecewise_graphs() -> None:
    with_drafts = graph_config(drafts=16, slots=256, max_step_tokens=4096)
    assert with_drafts["cudagraph_mode"] == "PIECEWISE"
    assert with_drafts["cudagraph_capture_sizes"][:5] == [1, 2, 4, 8, 16]
    assert with_drafts["cudagraph_capture_sizes"][-1] == 512
    without = graph_config(drafts=0, slots=256, max_step_tokens=4096)
    assert "cudagraph_mode" not in without, "vLLM's own: full graphs for one token a row"
    assert without["cudagraph_capture_sizes"][-1] == 256


@pytest.mark.parametrize(
    ("steps", "accepted", "said"), [(1999, 0, False), (2000, 0, True), (2000, 20_000, False)]
)
def test_a_drafter_that_never_paid_is_named(steps: int, accepted: int, said: bool) -> None:
    stats = EngineStats(
        tokens=TokenCounts(generated=100_000, drafted=accepted + 9, accepted=accepted),
        steps=steps, busy_seconds=1.0, running=0, waiting=0, slots=8, kv_used=0.0, policy_version=1,
    )  # fmt: skip
    assert bool(advice_on_drafting(stats)) == said
    assert not said or "cache.max_draft_tokens: 0" in advice_on_drafting(stats)


def test_vllm_is_imported_in_one_module_of_each_process() -> None:
    found = {
        str(path.relative_to(ENGINE))
        for path in ENGINE.rglob("*.py")
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
    }
    assert found == CONTACT
