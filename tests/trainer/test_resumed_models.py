"""A critic, its optimizer and a reference that moves are the same after a resume, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.learner import Learner

pytestmark = pytest.mark.usefixtures("_checked_once")

COMMON = {"device": "cpu", "learning_rate": 1e-2}
PPO = {"algorithm": "ppo", "ppo_epochs": 2, "minibatches": 2}


def _learner(path: str, **settings: Any) -> Learner:
    return Learner(TrainerConfig.model_validate(COMMON | settings), path, group_size=4, seed=1)


def _train(learner: Learner, group_of: Callable[..., list[Trajectory]]) -> None:
    version = learner.policy_version
    rng = np.random.default_rng(version)
    for group in range(2):
        number = 2 * version + group
        learner.add_group(group_of(number, rng, version=version), rng.normal(size=4))
    learner.step()


def _state(learner: Learner) -> dict[str, torch.Tensor]:
    """Every weight of every model, and every tensor of their optimizers."""
    models = learner._models
    modules: dict[str, torch.nn.Module] = {"policy": models.policy.model}
    optimizers = [learner._update.optimizer]
    if models.reference is not None:
        modules["reference"] = models.reference.policy.model
    if models.critic is not None:
        modules["critic"] = models.critic.module
        optimizers.append(models.critic.update.optimizer)
    found = {
        f"{name}/{key}": tensor
        for name, module in modules.items()
        for key, tensor in module.state_dict().items()
    }
    for index, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{index}/{number}/{key}": value for key, value in state.items()}
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(PPO, id="critic"),
        pytest.param({**PPO, "critic": {"shared_trunk": True}}, id="shared trunk"),
        pytest.param({"kl_coefficient": 0.1, "reference_refresh_steps": 2}, id="refreshed"),
        pytest.param({"kl_coefficient": 0.1, "reference_decay": 0.5}, id="averaged"),
    ],
)
def test_a_resumed_learner_continues_bit_for_bit(
    model_path: Callable[[str], str],
    group_of: Callable[..., list[Trajectory]],
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    learner = _learner(model_path("qwen3"), **settings)
    for _ in range(3):
        _train(learner, group_of)
    folder = tmp_path / "step-000003"
    learner.save(folder)
    resumed = _learner(model_path("qwen3"), **settings)
    resumed.restore(folder)
    for one in (learner, resumed):
        _train(one, group_of)
    expected, found = _state(learner), _state(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_rates_of_a_critic_may_change_and_its_advantages_may_not(
    model_path: Callable[[str], str], group_of: Callable[..., list[Trajectory]], tmp_path: Path
) -> None:
    learner = _learner(model_path("qwen3"), algorithm="ppo")
    _train(learner, group_of)
    learner.save(tmp_path / "step-000001")
    critic = {"learning_rate": 1e-3, "warmup_steps": 3}
    _learner(model_path("qwen3"), algorithm="ppo", critic=critic).restore(tmp_path / "step-000001")
    other = _learner(model_path("qwen3"), algorithm="ppo", critic={"gae_lambda": 1.0})
    with pytest.raises(CheckpointError, match=r"critic\.gae_lambda: 0\.95 -> 1\.0"):
        other.restore(tmp_path / "step-000001")


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, False),
        ({"kl_coefficient": 0.1}, True),
        ({"kl_coefficient": 0.1, "reference_decay": 0.9}, False),
    ],
    ids=["no reference", "the initial model", "one that is in the checkpoint"],
)
def test_another_reference_than_before_is_refused(
    settings: dict[str, Any],
    is_refused: bool,
    model_path: Callable[[str], str],
    group_of: Callable[..., list[Trajectory]],
    tmp_path: Path,
) -> None:
    """model.path has a model of the same shape by now."""
    learner = _learner(model_path("qwen3"), **settings)
    _train(learner, group_of)
    learner.save(tmp_path / "step-000001")
    other = AutoModelForCausalLM.from_pretrained(model_path("qwen3"))
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    resumed = _learner(str(tmp_path / "other"), **settings)
    if is_refused:
        with pytest.raises(CheckpointError, match="would be the reference of its KL penalty"):
            resumed.restore(tmp_path / "step-000001")
        return
    resumed.restore(tmp_path / "step-000001")
    wanted, found = _state(learner), _state(resumed)
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
