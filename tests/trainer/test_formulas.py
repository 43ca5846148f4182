"""Each algorithm's value and gradient against its published formula, written sample by sample.

The formulas here are written again from the papers, as loops over numpy float64 samples, with their
gradients by hand. Nothing of `asyncrl.trainer.algorithms` is used for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from trained_step import Array, Group, step_of, trained

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import sums_to_go
from asyncrl.trainer.base.algorithm_registry import known_algorithms
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.loss import Objective, overlong_penalties

# Published formulas. Each gives, for a sample, its loss before any division and the gradient of it
# by each token's log-probability.
Formula = Callable[[Array, Array, float], tuple[float, Array]]


def score_of(weight_of: Callable[[Array], Array], *, loss_is_weight: bool) -> Formula:
    """-w A grad log p; the value is -w A (written as a ratio) or -w A log p."""

    def formula(p: Array, b: Array, a: float) -> tuple[float, Array]:
        w = weight_of(p - b)
        return float((-w * a * (1.0 if loss_is_weight else p)).sum()), -w * a

    return formula


def clip_of(low: float, high: float, dual: float = math.inf) -> Formula:
    """PPO, token by token."""

    def formula(p: Array, b: Array, a: float) -> tuple[float, Array]:
        value, grad = 0.0, np.zeros(len(p))
        for t in range(len(p)):
            r = math.exp(p[t] - b[t])
            clipped = min(max(r, 1 - low), 1 + high)
            term = min(r * a, clipped * a)
            if a < 0 and term < dual * a:
                term = dual * a
            elif r * a <= clipped * a:
                grad[t] = -r * a
            value -= term
        return value, grad

    return formula


def gspo(p: Array, b: Array, a: float) -> tuple[float, Array]:
    s = math.exp((p - b).mean())
    clipped = min(max(s, 1 - 3e-4), 1 + 4e-4)
    # Times L, since it is divided by L below as every sequence-normalised loss here is.
    grad = np.full(len(p), -s * a) if s * a <= clipped * a else np.zeros(len(p))
    return -min(s * a, clipped * a) * len(p), grad


def cut(g: Array) -> Array:
    return np.minimum(np.exp(g), 2.0)


def whole(g: Array) -> Array:
    return np.full(len(g), min(math.exp(g.sum()), 2.0))


def standardised(r: Array) -> Array:
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def plain(r: Array) -> Array:
    return r - r.mean()


def others(r: Array) -> Array:
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


PUBLISHED: dict[str, tuple[Callable[[Array], Array], Formula, str]] = {
    "grpo": (standardised, score_of(cut, loss_is_weight=True), "token"),
    "dr_grpo": (plain, score_of(cut, loss_is_weight=True), "sample"),
    "dapo": (standardised, clip_of(0.2, 0.28), "token"),
    "reinforce": (others, score_of(cut, loss_is_weight=False), "token"),
    "rloo": (others, score_of(whole, loss_is_weight=False), "sample"),
    "gspo": (standardised, gspo, "sequence"),
    "cispo": (
        standardised,
        score_of(lambda g: np.minimum(np.exp(g), 5.0), loss_is_weight=False),
        "token",
    ),
    "gpg": (plain, score_of(cut, loss_is_weight=False), "token"),
}


def published(name: str, step: list[Group]) -> tuple[float, list[Array]]:
    """The step's loss and gradient by the paper, from the whole step at once."""
    advantages_of, formula, normalisation = PUBLISHED[name]
    lengths = [len(one) for group in step for one in group.current]
    total, grads = 0.0, []
    signal = sum(np.ptp(group.rewards) > 0 for group in step)
    alpha = len(step) / signal if name == "gpg" else 1.0
    for group in step:
        found = []
        for a, p, b in zip(
            advantages_of(group.rewards), group.current, group.behaviour, strict=True
        ):
            value, grad = formula(p, b, a)
            share = {"token": sum(lengths), "sample": len(lengths)}.get(
                normalisation, len(lengths) * len(p)
            )
            total += alpha * value / share
            found.append(alpha * grad / share)
        grads.append(np.concatenate(found))
    return total, grads


def close(got: tuple[float, list[Array]], want: tuple[float, list[Array]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-12, abs=1e-13)
    for mine, theirs in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_with_the_behaviour_policy_there_is_no_clip_but_the_papers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO, eq. 3: with a negative advantage a token keeps its gradient at any ratio above 1."""
    step = step_of(1, spread=2.0)
    advantages_of, _, normalisation = PUBLISHED[name]
    monkeypatch.setitem(PUBLISHED, "here", (advantages_of, clip_of(0.2, 0.2), normalisation))
    close(trained(step, algorithm=name, proximal_policy="behaviour"), published("here", step))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("spread", [0.0, 4e-4, 0.5, 2.0])
def test_value_and_gradient_are_the_published_ones(name: str, spread: float) -> None:
    step = step_of(1, spread=spread)
    got, want = trained(step, algorithm=name), published(name, step)
    close(got, want)
    assert max(np.abs(one).max() for one in got[1]) > 1e-3


def normalised_over_the_step(
    step: list[Group], *, baseline: bool, beta: float = 0.0
) -> list[Array]:
    """REINFORCE++: advantages of all tokens, normalised together, per group."""
    raw = []
    for group in step:
        rewards = group.rewards - group.rewards.mean() if baseline else group.rewards
        raw.append(
            np.concatenate(
                [
                    r - beta * np.array([(p - q)[t:].sum() for t in range(len(p))])
                    for r, p, q in zip(rewards, group.current, group.reference, strict=True)
                ]
            )
        )
    everything = np.concatenate(raw)
    return [(one - everything.mean()) / everything.std() for one in raw]


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_advantages_are_normalised_over_the_step_though_groups_are_streamed(
    baseline: bool, beta: float, spread: float
) -> None:
    step = step_of(2, spread=spread)
    advantages = normalised_over_the_step(step, baseline=baseline, beta=beta)
    tokens = sum(len(one) for one in advantages)
    value, grads = 0.0, []
    for group, a in zip(step, advantages, strict=True):
        w = cut(np.concatenate(group.current) - np.concatenate(group.behaviour))
        value -= float((w * a).sum()) / tokens
        grads.append(-w * a / tokens)
    name = "reinforce_plus_plus" + "_baseline" * baseline
    settings = {"kl_coefficient": beta, "kl_estimator": "k1"} if beta else {}
    got = trained(step, algorithm=name, **settings)
    assert got[0] == pytest.approx(value, abs=1e-12)
    for mine, theirs in zip(got[1], grads, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg"])
def test_a_step_without_spread_has_no_gradient(name: str) -> None:
    step = step_of(3, groups=2)
    for group in step:
        group.rewards[:] = 0.3
    _, grads = trained(step, algorithm=name)
    assert all(not one.any() for one in grads)


@pytest.mark.parametrize("name", ["grpo", "gpg", "reinforce_plus_plus"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_in_the_loss_is_not_scaled_by_the_step(name: str, estimator: str) -> None:
    step = step_of(4)
    without = trained(step, algorithm=name)
    given = {"kl_coefficient": 0.3, "kl_estimator": estimator, "kl_clamp": 0.2}
    value, grads = trained(step, algorithm=name, **given)
    tokens = sum(len(one) for group in step for one in group.current)
    added, clamped = 0.0, 0
    for group, grad, own in zip(step, grads, without[1], strict=True):
        gap = np.concatenate(group.reference) - np.concatenate(group.current)
        k = gap**2 / 2 if estimator == "k2" else np.exp(gap) - 1 - gap
        slope = -gap if estimator == "k2" else 1 - np.exp(gap)
        clamped += int((k > 0.2).sum())
        added += float(np.minimum(k, 0.2).sum())
        want = own + 0.3 * np.where(k <= 0.2, slope, 0.0) / tokens
        np.testing.assert_allclose(grad, want, rtol=1e-10, atol=1e-13)
    assert clamped
    assert value == pytest.approx(without[0] + 0.3 * added / tokens, rel=1e-10)


def test_every_algorithm_has_a_formula_here() -> None:
    here = {*PUBLISHED, "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    here |= {"ppo"}  # in test_ppo.py
    assert set(known_algorithms()) == here


def test_overlong_shaping() -> None:
    lengths = np.array([3, 10, 12, 16, 20])
    got = overlong_penalties(lengths, longest=20, buffer=10)
    assert got.tolist() == [0, 0, -0.2, -0.6, -1]
    assert not overlong_penalties(lengths, longest=20, buffer=0).any()


def test_sums_to_go() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0])
    owners = torch.tensor([0, 0, 0, 1, 1])
    assert sums_to_go(values, owners).tolist() == [6, 5, 3, 30, 20]


def test_overlong_responses_lose_reward(group_of: Callable[..., list[Trajectory]]) -> None:
    group = group_of(0, np.random.default_rng(0))
    lengths = np.array([len(one.tokens) for one in group])
    rewards = np.arange(4.0)
    objective = Objective(TrainerConfig(algorithm="rloo", overlong_buffer=6), 4, 13)
    shaped = rewards + np.clip((13 - 6 - lengths) / 6, -1, 0)
    assert (shaped != rewards).any()
    np.testing.assert_allclose(objective.advantages(group, rewards), others(shaped), atol=1e-12)
    with pytest.raises(TrainerError, match="longer than the longest response"):
        Objective(TrainerConfig(overlong_buffer=14), 4, 13)
