"""Estimates against exact expectations: all outcomes of a few samples are enumerated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from asyncrl.evaluation.round import estimate, ks_of, pass_at_k
from asyncrl.wire.records.evaluations import Verdict


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for right in range(n + 1):
        samples = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(samples, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(right, n, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("p", "n"), [(0.05, 8), (0.5, 6)])
def test_pass_at_k_is_unbiased_and_the_plug_in_is_not(p: float, n: int) -> None:
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(2, n + 1):
        truth = 1 - (1 - p) ** k
        mean = sum(w * pass_at_k(c, n, k) for c, w in enumerate(chances))
        plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chances))
        assert mean == pytest.approx(truth, abs=1e-12)
        assert truth - plug_in > 0.002


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@5 cannot be estimated from 4 samples"):
        pass_at_k(1, 4, 5)
    assert ks_of(1) == [1]
    assert ks_of(6) == [1, 2, 4, 6]


def test_standard_errors_are_over_prompts() -> None:
    """Of perfectly correlated samples: more of them per prompt say nothing more."""
    rng = np.random.default_rng(0)
    right = rng.random((50, 1)) < 0.4
    one, many = (estimate(np.repeat(right, n, axis=1), threshold=0.5) for n in (1, 16))
    share = right.mean()
    assert one.accuracy == many.accuracy == pytest.approx(share)
    assert one.accuracy_error == pytest.approx(math.sqrt(share * (1 - share) / 49))
    assert many.accuracy_error == pytest.approx(one.accuracy_error)
    assert many.pass_at == pytest.approx(dict.fromkeys([1, 2, 4, 8, 16], share))
    assert many.pass_at_error[16] == pytest.approx(one.accuracy_error)
    assert many.samples == 16 * one.samples == 800


def test_rewards_and_lengths_are_averaged_and_a_threshold_decides() -> None:
    found = estimate([[0.2, 0.9], [0.5, 0.6]], threshold=0.5, lengths=[[1, 2], [3, 6]])
    assert (found.accuracy, found.reward, found.tokens) == pytest.approx((0.5, 0.55, 3.0))
    assert found.reward_error == pytest.approx(0.0, abs=1e-12)
    assert found.graded_reward == found.reward
    alone = estimate([[1.0]], threshold=0.5)
    assert (alone.accuracy, alone.accuracy_error, alone.graded_reward) == (1.0, None, None)
    all_right = estimate([[1.0]] * 16, threshold=0.5)
    assert all_right.interval == pytest.approx((0.806, 1.0), abs=1e-3), "16 of 16 prove little"
    assert estimate([], threshold=0.5).samples == 0


def test_unscored_samples_are_left_out_up_to_a_share() -> None:
    """Of which prompts they are does not shift the mean over prompts."""
    rewards = [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    verdicts: list[list[Verdict]] = [
        ["unscored", "unscored", "unscored", "scored"],
        ["scored", "failed", "scored", "scored"],
        ["unscored", "scored", "scored", "scored"],
    ]
    whole = estimate(rewards, threshold=0.5)
    assert (whole.unscored, whole.failed, whole.is_complete) == (0, 0, True)
    found = estimate(rewards, threshold=0.5, verdicts=verdicts, max_unscored_share=0.34)
    assert (found.prompts, found.samples, found.unscored, found.failed) == (3, 8, 4, 1)
    assert found.accuracy == found.reward == pytest.approx((1 + 0 + 1 / 3) / 3)
    assert found.pass_at[1] == pytest.approx(found.accuracy)
    assert found.pass_at[2] == pytest.approx((0 + 2 / 3) / 2)  # the first prompt has one sample
    assert found.pass_at[4] == 0.0
    few = estimate(rewards, threshold=0.5, verdicts=verdicts, max_unscored_share=0.33)
    assert not few.is_complete
    assert (few.reward, few.pass_at, few.samples, few.unscored) == (None, {}, 8, 4)


def test_rewards_that_have_all_failed_are_no_accuracy() -> None:
    for one in ("failed", "unscored"):
        rows: list[list[Verdict]] = [[one]] * 3  # type: ignore[list-item]
        found = estimate([[0.0]] * 3, threshold=0.5, verdicts=rows, max_unscored_share=0.99)
        assert found.accuracy is None
    half: list[list[Verdict]] = [["failed"], ["scored"]]
    assert estimate([[0.0], [1.0]], threshold=0.5, verdicts=half).accuracy == 0.5
