"""Advantages and losses against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.trainer.algorithms.base import LossSums, TokenBatch, finisher
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.algorithm_registry import known_algorithms
from asyncrl.trainer.base.config import CriticConfig, TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.optimizer.optimizer import learning_rate


def needs_all(name: str) -> bool:
    """Whether the algorithm's advantages are those of a whole step."""
    found = finisher(make(TrainerConfig(algorithm=name)))
    return found is not None and found.needs_every_group


def proximal_of(name: str) -> str:
    return TrainerConfig(algorithm=name).proximal_policy


def _loss(
    config: TrainerConfig, ratio: float, advantage: float, weight: float = 1.0
) -> tuple[float, float, LossSums]:
    """Loss and d loss / d logprob of one token with this ratio to its behaviour probability."""
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(
        logprob,
        logprob.detach() - math.log(ratio),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([weight], dtype=torch.float64),
    )
    sums = make(config).loss(batch)
    sums.loss.backward()
    assert logprob.grad is not None
    return float(sums.loss.detach()), float(logprob.grad), sums


def _counts(sums: LossSums) -> tuple[int, int]:
    """Clipped and bounded tokens; an algorithm that never does one does not report it."""
    bounded = sum(int(sums.sums.get(name, 0)) for name in ("importance_capped", "dual_clipped"))
    return int(sums.sums.get("clip_ratio", 0)), bounded


def test_grpo_advantages() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    std = make(TrainerConfig()).advantages(rewards)
    np.testing.assert_allclose(std, np.array([-1, 1, 1, -1]) * 0.5 / np.std(rewards, ddof=1), 1e-5)
    plain = make(TrainerConfig(advantage_normalization="none")).advantages(rewards)
    assert plain.tolist() == [-0.5, 0.5, 0.5, -0.5]


def test_leave_one_out_advantages() -> None:
    rewards = np.array([0.0, 1.0, 5.0])
    got = make(TrainerConfig(algorithm="reinforce")).advantages(rewards)
    np.testing.assert_allclose(got, [0 - 3.0, 1 - 2.5, 5 - 0.5])


@pytest.mark.parametrize("name", [one for one in known_algorithms() if not needs_all(one)])
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 9))
def test_equal_rewards_carry_no_signal(name: str, reward: float, size: int) -> None:
    got = make(TrainerConfig(algorithm=name)).advantages(np.full(size, reward))
    assert not got.any()


@pytest.mark.parametrize(
    "name", [one for one in known_algorithms() if proximal_of(one) == "current"]
)
@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.0, 2.0, 1.0), (1.5, -1.0, 0.25), (5.0, 1.0, 1.0)]
)
def test_truncated_importance(name: str, ratio: float, advantage: float, weight: float) -> None:
    _, grad, sums = _loss(TrainerConfig(algorithm=name), ratio, advantage, weight)
    assert grad == pytest.approx(-weight * min(ratio, 2.0) * advantage)
    assert _counts(sums) == (0, int(ratio > 2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient", "clipped", "capped"),
    [
        (1.1, 1.0, -1.1, True, 0, 0),
        (1.4, 1.0, -1.28, False, 1, 0),  # clip-higher
        (0.5, 1.0, -0.5, True, 0, 0),  # pessimistic: an unlikely good token is pulled up
        (0.5, -1.0, 0.8, False, 1, 0),
        (1.4, -1.0, 1.4, True, 0, 0),
        (9.0, -1.0, 3.0, False, 1, 1),  # dual clip
    ],
)
def test_clipped_ratio(
    ratio: float, advantage: float, loss: float, has_gradient: bool, clipped: int, capped: int
) -> None:
    config = TrainerConfig(
        proximal_policy="behaviour", clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=3.0
    )
    got, grad, sums = _loss(config, ratio, advantage)
    assert got == pytest.approx(loss)
    assert grad == pytest.approx(-ratio * advantage if has_gradient else 0.0)
    assert _counts(sums) == (clipped, capped)


@pytest.mark.parametrize(
    ("name", "proximal"),
    [("grpo", "behaviour"), *[(one, proximal_of(one)) for one in known_algorithms()]],
)
def test_empty_batch_and_masked_tokens(name: str, proximal: str) -> None:
    config = TrainerConfig.model_validate({"algorithm": name, "proximal_policy": proximal})
    empty = torch.empty(0)
    assert float(make(config).loss(TokenBatch(empty, empty, empty, empty)).loss) == 0
    loss, grad, sums = _loss(config, 9.0, -1.0, weight=0.0)
    assert (loss, grad, *_counts(sums)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"algorithm": "a2c"}, "known: cispo, dapo"),
        ({"learning_rat": 1e-4}, "learning_rat"),
        ({"learning_rate_minimum": 1.0}, "above learning_rate"),
        ({"warmup_steps": 9, "schedule_steps": 9}, "greater than"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"importance_cap": 0.5}, "importance_cap"),
        ({"algorithm": "rloo", "advantage_normalization": "std"}, "only advantage_norm.*none"),
        ({"algorithm": "reinforce_plus_plus", "advantage_normalization": "none"}, "only.*std"),
        ({"algorithm": "gspo", "dual_clip": 3.0}, "only dual_clip: None"),
        ({"algorithm": "gpg", "kl_coefficient": 0.1, "kl_estimator": "k1"}, "choose k2 or k3"),
        ({"algorithm": "dr_grpo", "advantage_normalization": "std"}, "only advantage_norm.*none"),
        ({"algorithm": "gspo", "proximal_policy": "current"}, "only proximal_policy: behaviour"),
        ({"algorithm": "gpg", "proximal_policy": "behaviour"}, "only proximal_policy: current"),
        ({"algorithm": "dapo", "correction": "sequence_truncated"}, "already contains the ratio"),
        ({"correction": "token_masked", "correction_band": [1.1, 2]}, "two ratios around 1"),
        ({"correction": "icepop"}, "token_masked"),
        ({"kl_estimator": "k4"}, "k1"),
        ({"log_ratio_clamp": 0}, "greater than 0"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TrainerConfig.model_validate(values)


def test_every_setting_is_described() -> None:
    fields = TrainerConfig.model_fields.values()
    sections = (CriticConfig, LoraConfig)  # described by their classes
    assert all(field.description for field in fields if field.annotation not in sections)


def test_learning_rate_schedules() -> None:
    base = {"learning_rate": 1.0, "learning_rate_minimum": 0.2, "warmup_steps": 3}
    constant = TrainerConfig.model_validate(base)
    assert [learning_rate(constant, s, None) for s in (0, 2, 3, 99)] == [0.25, 0.75, 1.0, 1.0]
    linear = TrainerConfig.model_validate(base | {"learning_rate_schedule": "linear"})
    assert [learning_rate(linear, s, 7) for s in (3, 5, 7, 9)] == pytest.approx([1, 0.6, 0.2, 0.2])
    cosine = TrainerConfig.model_validate(
        base | {"learning_rate_schedule": "cosine", "schedule_steps": 7}
    )
    assert [learning_rate(cosine, s, None) for s in (3, 5, 7)] == pytest.approx([1, 0.6, 0.2])
    with pytest.raises(TrainerError, match="schedule_steps"):
        learning_rate(linear, 3, None)
