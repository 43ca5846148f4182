"""The comparison of routes: none differ from themselves, and some from those in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.routing import compared, measure, random_mixture


def test_routes_differ_by_precision_only(tmp_path: Path) -> None:
    found = measure(random_mixture(str(tmp_path)), samples=4, tokens=60)
    assert found["tokens"] == 240
    for pair in found["pairs"].values():
        assert 0 < pair["share_of_choices_that_differ"] < 0.3
        assert pair["share_of_choices_that_differ"] <= pair["share_of_tokens_with_one"]
        assert pair["logprob_gap_mean_same_experts"] < pair["logprob_gap_mean_other_experts"]
    logprobs, experts = torch.zeros(5), torch.zeros(5, 2, 2, dtype=torch.int64)
    same = compared((logprobs, experts), (logprobs, experts))
    assert same["share_of_choices_that_differ"] == same["logprob_gap_mean_same_experts"] == 0
    assert same["logprob_gap_mean_other_experts"] is None
