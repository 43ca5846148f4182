"""Weights of stale tokens against loops over samples, and what they do to a loss."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.trainer.algorithms.base import LossSums, TokenBatch
from asyncrl.trainer.algorithms.corrections import correction_of, make
from asyncrl.trainer.base.config import TrainerConfig

LENGTHS = [3, 1, 2]
GAPS = [[0.1, -0.3, 1.2], [2.0], [-1.0, 0.9]]


def flat(lists: list[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(lists))


def by_hand(name: str, gaps: list[float]) -> list[float]:
    """Weights of one sample; cap 2, band 0.5 to 3."""
    ratios, product = [math.exp(g) for g in gaps], math.exp(sum(gaps))
    mean = math.exp(sum(gaps) / len(gaps))
    return {
        "none": [1.0] * len(gaps),
        "token_truncated": [min(r, 2.0) for r in ratios],
        "token_masked": [r if 0.5 <= r <= 3 else 0.0 for r in ratios],
        "sequence_truncated": [min(product, 2.0)] * len(gaps),
        "sequence_masked": [product if 0.5 <= product <= 3 else 0.0] * len(gaps),
        "sequence_rejected": [min(r, 2.0) if 0.5 <= mean <= 3 else 0.0 for r in ratios],
    }[name]


def config_of(name: str, **settings: Any) -> TrainerConfig:
    band = {"correction_band": [0.5, 3]} if name.endswith(("masked", "rejected")) else {}
    return TrainerConfig.model_validate({"correction": name, **band, **settings})


def loss_of(config: TrainerConfig, gaps: list[list[float]] = GAPS) -> tuple[np.ndarray, LossSums]:
    """Gradient by log-probability, and the sums; every advantage is 1."""
    lengths = [len(one) for one in gaps]
    logprobs = torch.full((sum(lengths),), -1.0, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(sum(lengths), dtype=torch.float64)
    batch = TokenBatch(
        logprobs,
        logprobs.detach() - torch.tensor(flat(gaps)),
        ones,
        ones,
        owners=torch.tensor(np.repeat(np.arange(len(lengths)), lengths)),
    )
    sums = make(config).loss(batch)
    (grad,) = torch.autograd.grad(sums.loss, logprobs)
    return grad.numpy(), sums


@pytest.mark.parametrize(
    "name",
    ["none", "token_truncated", "token_masked", "sequence_truncated", "sequence_masked",
     "sequence_rejected"],
)  # fmt: skip
def test_weights_and_their_numbers(name: str) -> None:
    want = np.array(flat([by_hand(name, gaps) for gaps in GAPS]))
    owners = torch.tensor(np.repeat(np.arange(3), LENGTHS))
    found = correction_of(config_of(name))(torch.tensor(flat(GAPS)), owners)
    np.testing.assert_allclose(found.importance, want, rtol=1e-6)
    grad, sums = loss_of(config_of(name))
    np.testing.assert_allclose(grad, -want, rtol=1e-6)
    assert float(sums.sums["correction_masked"]) == (want == 0).sum()
    of_samples = name == "sequence_truncated"
    ratios = [sum(one) if of_samples else g for one in GAPS for g in one]
    cuts = name.endswith(("truncated", "rejected"))
    capped = [cuts and w > 0 and r > math.log(2) for w, r in zip(want, ratios, strict=True)]
    assert float(sums.sums["importance_capped"]) == sum(capped)
    used, squares = sums.sums["effective_share"].tolist()
    assert used**2 / (6 * squares) == pytest.approx(want.sum() ** 2 / (6 * (want**2).sum()))
    ratios = np.exp(np.array(flat(GAPS)))
    assert float(sums.sums["chi_squared"]) == pytest.approx((ratios**2 - 1).sum())


def test_a_long_sample_is_rejected_by_its_mean_ratio_not_by_its_length() -> None:
    """Twenty tokens of e^0.2: together e^4, far outside the band."""
    gaps, owners = torch.full((20,), 0.2), torch.zeros(20, dtype=torch.int64)
    found = correction_of(config_of("sequence_rejected"))(gaps, owners)
    np.testing.assert_allclose(found.importance, math.exp(0.2), rtol=1e-6)
    masked = correction_of(config_of("sequence_masked"))(gaps, owners)
    assert not masked.importance.any()


def test_a_ratio_in_the_loss_is_not_weighed_again_but_left_out() -> None:
    """cispo has no clip below 5 here: its weight is the ratio."""
    ratios = np.exp(np.array(flat(GAPS)))
    plain, _ = loss_of(TrainerConfig(algorithm="cispo", clip_ratio_high=9))
    np.testing.assert_allclose(plain, -ratios, rtol=1e-6)
    masked, _ = loss_of(config_of("token_masked", algorithm="cispo", clip_ratio_high=9))
    np.testing.assert_allclose(masked, -ratios * ((ratios >= 0.5) & (ratios <= 3)), rtol=1e-6)
    ppo = {"proximal_policy": "behaviour", "clip_ratio_high": 9}
    clipped, sums = loss_of(config_of("sequence_rejected", **ppo))
    kept = np.repeat([True, False, True], LENGTHS)
    np.testing.assert_allclose(clipped, -ratios * kept, rtol=1e-6)
    assert float(sums.sums["clip_ratio"]) == 0
    assert not {"effective_share", "importance_capped"} & sums.sums.keys()


def test_nothing_is_capped_on_policy() -> None:
    _, sums = loss_of(TrainerConfig(importance_cap=1.0), [[0.0, 0.0]])
    assert float(sums.sums["importance_capped"]) == 0


@pytest.mark.parametrize(
    ("settings", "advantage", "gradient", "clipped"),
    [
        ({}, -1.0, math.exp(10), 0),  # PPO bounds only what improves the loss
        ({"dual_clip": 3.0}, -1.0, 0.0, 1),
        ({"log_ratio_clamp": 2.0}, -1.0, math.exp(2), 0),
        ({"dual_clip": 3.0}, 1.0, 0.0, 0),
    ],
)
def test_what_bounds_the_ratio_to_the_proximal_policy(
    settings: dict[str, float], advantage: float, gradient: float, clipped: int
) -> None:
    """A token with p / x = e^10 in a later update, drawn by the proximal policy."""
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    start, ones = torch.full((1,), -11.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    batch = TokenBatch(logprob, start, advantage * ones, ones, proximal_logprobs=start)
    sums = make(TrainerConfig.model_validate({"ppo_epochs": 4, **settings})).loss(batch)
    (grad,) = torch.autograd.grad(sums.loss, logprob)
    assert float(grad) == pytest.approx(gradient)
    assert float(sums.sums["dual_clipped"]) == clipped


def test_a_clamp_bounds_ratios_and_leaves_the_gradient() -> None:
    far = [[40.0, -40.0, 0.1]]
    grad, sums = loss_of(
        TrainerConfig(algorithm="cispo", clip_ratio_high=1e6, log_ratio_clamp=1), far
    )
    np.testing.assert_allclose(grad, -np.exp([1, -1, 0.1]), rtol=1e-6)
    assert float(sums.sums["chi_squared"]) < 9
