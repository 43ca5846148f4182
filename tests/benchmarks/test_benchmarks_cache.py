"""benchmarks.cache at a small size: its JSON is complete, and a missing package is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from benchmarks.cache import baselines
from benchmarks.cache import main as bench
from benchmarks.cache.baselines import GROUP, PROMPT, ArcticDrafter, NaiveDrafter, replay, rollouts

TINY = bench.Plan(prompts=2, length=60, steps=5, repeats=2, replayed=1, memory=(2, 1, 50))
MEMORY = {"tokens": 10, "bytes_per_token": 20.0, "bytes_per_token_own_count": 19.0}


class FakeArctic:
    """The interface of ArcticInference's cache; drafts the tokens that were added last."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.depth = max_tree_depth
        self.requests: dict[int, list[int]] = {}
        self.last = [1]

    def start_request(self, request: int, prompt: np.ndarray) -> None:
        assert request not in self.requests
        assert prompt.dtype == np.int32
        self.requests[request] = prompt.tolist()

    def stop_request(self, request: int) -> None:
        del self.requests[request]

    def add_active_response(self, request: int, tokens: list[int]) -> None:
        self.requests[request] += tokens
        self.last = tokens

    def speculate(self, request: int, pattern: np.ndarray, max_spec_tokens: int) -> object:
        assert pattern.tolist() == self.requests[request][-self.depth :]
        assert pattern.dtype == np.int32
        return type("Draft", (), {"token_ids": self.last[:max_spec_tokens]})


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load_seconds", lambda directory: 1.0)
    monkeypatch.setattr(bench, "measure_memory", lambda who, *plan: dict(MEMORY))


def test_with_arctic_all_named_ratios_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "arctic", lambda: (FakeArctic, "0.3.0"))
    monkeypatch.setattr(bench, "QUICK", TINY)
    bench.main(["--quick", "--json", str(tmp_path / "cache.json")])
    read = json.loads((tmp_path / "cache.json").read_text())
    assert bench.TARGETS.keys() <= read["ratios"].keys()
    assert all(ratio >= 0 for ratio in read["ratios"].values())
    assert read["ratios"]["bytes_vs_arctic"] == 1.0
    assert {"tree", "naive", bench.ARCTIC, bench.ARCTIC_DEEP} <= read["raw"].keys()
    said = capsys.readouterr().out
    assert "step_vs_arctic" in said
    assert "MISSING" not in said


def test_without_arctic_a_message_says_so_and_its_ratios_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "arctic_inference", None)
    monkeypatch.setitem(__import__("sys").modules, "arctic_inference.suffix_decoding", None)
    assert baselines.arctic() is None
    monkeypatch.setattr(bench, "FULL", TINY)
    bench.main([])
    said = capsys.readouterr().out
    assert "MISSING: arctic-inference is not installed" in said
    assert "insert_vs_naive" in said
    assert "insert_vs_arctic" not in said


def test_rollouts_repeat_the_text_of_their_prompt_and_differ() -> None:
    one, two = rollouts(3, 2, 200)
    assert len(one) == len(two) == 3 * GROUP
    assert all(len(tokens) == 200 and tokens.dtype == np.int32 for tokens in one)
    assert any((a != b).any() for a, b in zip(one, two, strict=True))
    shared = np.isin(one[0], one[1]).mean()
    assert shared > 0.5 > np.isin(one[0], one[GROUP]).mean()
    assert [t.tolist() for t in rollouts(3, 2, 200)[1]] == [t.tolist() for t in two]


def test_a_replay_counts_what_was_accepted() -> None:
    tokens = np.arange(100, dtype=np.int32)
    for drafter in (RolloutCache(CacheConfig()), NaiveDrafter(), ArcticDrafter(FakeArctic, 24)):
        first = replay(drafter, [tokens], 16)  # type: ignore[arg-type]
        assert first["tokens_per_step"] == 1.0
        if not isinstance(drafter, ArcticDrafter):
            second = replay(drafter, [tokens], 16)  # type: ignore[arg-type]
            assert second["tokens_per_step"] > 10
            assert second["accepted_share"] == 1.0


def test_sharing_is_measured_on_all_tokens() -> None:
    numbers = bench.measure_exchange(rollouts(2, 1, 300)[0])
    assert 4.0 < numbers["bytes_per_token"] < 4.5
    assert all(value > 0 for value in numbers.values())


def test_memory_is_measured_for_every_token() -> None:
    samples = [np.arange(500, dtype=np.int32) for _ in range(2 * GROUP)]
    assert len(PROMPT) == 20
    numbers = bench.tree(samples, 2)
    assert numbers["tokens"] == 500 * 2 * GROUP
    assert numbers["own_count"] > 4 * numbers["tokens"]
