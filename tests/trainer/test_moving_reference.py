"""A reference that follows the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize(
    "settings", [{}, {"reference_refresh_steps": 2}, {"reference_decay": 0.75}]
)
def test_the_reference_follows_as_configured(
    model_path: Callable[[str], str],
    group_of: Callable[..., list[Trajectory]],
    settings: dict[str, Any],
) -> None:
    values = {"device": "cpu", "dtype": "float64", "learning_rate": 1e-2, "kl_coefficient": 0.1}
    config = TrainerConfig.model_validate(values | settings)
    learner = Learner(config, model_path("qwen3"), group_size=4, seed=1)
    reference = learner._models.reference
    assert reference is not None
    assert reference.moves == bool(settings)
    expected = _weights(learner.policy.model)
    rng = np.random.default_rng(0)
    for step in range(4):
        learner.add_group(group_of(step, rng), rng.normal(size=4))
        found = learner.step().algorithm["reference_kl"]
        assert found is not None
        after_copy = "reference_refresh_steps" in settings and step % 2 == 0
        assert (abs(found) < 1e-15) == (step == 0 or after_copy)
        policy = _weights(learner.policy.model)
        if "reference_refresh_steps" in settings and step % 2 == 1:
            expected = policy
        if "reference_decay" in settings:
            expected = [0.75 * r + 0.25 * p for r, p in zip(expected, policy, strict=True)]
        for one, other in zip(expected, _weights(reference.policy.model), strict=True):
            torch.testing.assert_close(one, other, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reference_decay": 0.9, "reference_refresh_steps": 1, "kl_coefficient": 1},
            "choose one",
        ),
        ({"algorithm": "ppo", "critic": {"shared_trunk": True, "model": "x"}}, "shared_trunk"),
        (
            {"algorithm": "ppo", "critic": {"shared_trunk": True}, "router_loss_coefficient": 0.1},
            "router_loss_coefficient",
        ),
        (
            {"algorithm": "ppo", "critic": {"shared_trunk": True, "head_start_steps": 1}},
            "head_start_steps",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig.model_validate(settings)
