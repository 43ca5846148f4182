"""Advantages of a critic against an independent recursion, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncrl.trainer.step_targets import advantages_of, token_rewards


def by_definition(
    rewards: np.ndarray, values: np.ndarray, last: float, gamma: float, lam: float
) -> np.ndarray:
    """Eq. 16 of arXiv 1506.02438: the sum of (gamma lambda)^k delta[t + k], written out."""
    length = len(rewards)
    after = [*values[1:], last]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(length)]
    return np.array(
        [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
    )


@pytest.mark.parametrize(("gamma", "lam"), [*itertools.product((1.0, 0.9), (0.0, 0.5, 0.95, 1.0))])
@pytest.mark.parametrize("bootstraps", [False, True])
def test_advantages_and_returns_are_the_papers(gamma: float, lam: float, bootstraps: bool) -> None:
    rng = np.random.default_rng(5)
    lengths = np.array([3, 1, 7, 2])
    rewards, values = rng.normal(size=13), rng.normal(size=13)
    last = rng.normal(size=4) if bootstraps else np.zeros(4)
    advantages, returns = advantages_of(
        rewards, values, lengths, last if bootstraps else None, gamma=gamma, gae_lambda=lam
    )
    start = 0
    for length, after in zip(lengths, last, strict=True):
        part = slice(start, start + length)
        want = by_definition(rewards[part], values[part], after, gamma, lam)
        np.testing.assert_allclose(advantages[part], want, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(returns[part], want + values[part], rtol=1e-13, atol=1e-13)
        start += length


def test_with_lambda_and_gamma_1_the_value_is_a_baseline() -> None:
    rewards = token_rewards(np.array([2.0, -1.0]), np.array([3, 2]))
    assert rewards.tolist() == [0, 0, 2, 0, -1]
    values = np.array([0.5, 7.0, -3.0, 1.0, 2.0])
    advantages, returns = advantages_of(rewards, values, np.array([3, 2]), gae_lambda=1.0)
    np.testing.assert_allclose(advantages, np.array([2, 2, 2, -1, -1]) - values)
    np.testing.assert_allclose(returns, [2, 2, 2, -1, -1])


def test_penalties_are_taken_from_each_token() -> None:
    got = token_rewards(np.array([1.0, 1.0]), np.array([2, 1]), np.array([0.5, 0.25, 0.125]))
    assert got.tolist() == [-0.5, 0.75, 0.875]
