"""Groups and gradients that a learner refuses, and what is left afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import BatchError, NonFiniteError, TrainerError
from asyncrl.trainer.learner import Learner

GroupOf = Callable[..., list[Trajectory]]
ModelPath = Callable[[str], str]


def _learner(path: str, **settings: Any) -> Learner:
    values = {"dtype": "float64", "learning_rate": 1e-3, "device": "cpu"} | settings
    return Learner(TrainerConfig.model_validate(values), path, group_size=4, seed=1)


def test_bad_groups_are_refused_and_leave_no_trace(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    learner = _learner(model_path("qwen3"))
    group = group_of(3, np.random.default_rng(0))
    rewards = np.arange(4, dtype=np.float32)
    first = group[0]
    replaced = dataclasses.replace
    bad = [
        (group[:3], rewards[:3], "expected 4"),
        ([*group[:3], group[0]], rewards, "distinct"),
        (group, np.array([0, 1, 2, np.nan]), "finite"),
        ([replaced(first, tokens=first.tokens + 99), *group[1:]], rewards, "another model"),
        (
            [replaced(first, behaviour_logprobs=first.behaviour_logprobs - np.inf), *group[1:]],
            rewards,
            "not finite",
        ),
        (group_of(3, np.random.default_rng(0), version=1), rewards, "old checkpoint"),
        ([replaced(first, prompt_tokens=first.prompt_tokens[:0]), *group[1:]], rewards, "empty"),
    ]
    for trajectories, values, reason in bad:
        with pytest.raises(BatchError, match=reason):
            learner.add_group(trajectories, values)
    assert all(p.grad is None for p in learner.policy.model.parameters())
    learner.add_group(group, rewards)
    with pytest.raises(BatchError, match="already"):
        learner.add_group(group, rewards)
    assert learner.step().batch.groups == 1


def test_a_gradient_that_is_not_a_number_changes_nothing(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    learner = _learner(model_path("qwen3"))
    before = {n: t.clone() for n, t in learner.tensors()}
    learner.add_group(group_of(0, np.random.default_rng(0)), np.arange(4, dtype=np.float32))
    next(p for p in learner.policy.model.parameters() if p.grad is not None).grad.fill_(
        float("nan")
    )
    with pytest.raises(NonFiniteError, match="step 0"):
        learner.step()
    assert learner.policy_version == 0
    assert all(torch.equal(t, before[n]) for n, t in learner.tensors())
    assert learner.step().batch.groups == 0


def test_a_loss_that_is_not_a_number_names_its_groups(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    """Losses are read at the step, so that the host does not wait for each."""
    learner = _learner(model_path("llama"))
    rng = np.random.default_rng(1)
    for group in (2, 3):
        learner.add_group(group_of(group, rng), np.arange(4, dtype=np.float32))
    before = {n: t.clone() for n, t in learner.tensors()}
    weight = learner.policy.model.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    learner.add_group(group_of(7, np.random.default_rng(0)), np.arange(4, dtype=np.float32))
    with torch.no_grad():
        weight.copy_(kept)
    with pytest.raises(NonFiniteError, match="step 0: the loss of group 7 is nan"):
        learner.step()
    assert learner.policy_version == 0
    assert all(torch.equal(t, before[n]) for n, t in learner.tensors())


def test_groups_of_one_and_endless_schedules_are_refused(model_path: ModelPath) -> None:
    with pytest.raises(TrainerError, match="at least 2"):
        Learner(TrainerConfig(), model_path("qwen3"), group_size=1, seed=0)
    with pytest.raises(TrainerError, match="schedule_steps"):
        _learner(model_path("qwen3"), learning_rate_schedule="cosine")


@pytest.mark.parametrize("algorithm", ["reinforce_plus_plus", "ppo"])
def test_what_is_kept_for_one_backward_pass_is_refused_where_there_are_two(algorithm: str) -> None:
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "gradient_checkpointing": "selective",
        "advantage_normalization": "std",
    }
    if algorithm == "ppo":
        settings["proximal_policy"] = "current"
    with pytest.raises(ValidationError, match=f"algorithm: {algorithm} needs two while groups"):
        TrainerConfig(**settings)
    TrainerConfig(**settings | {"gradient_checkpointing": True})
    TrainerConfig(**settings | {"minibatches": 2})
    TrainerConfig(gradient_checkpointing="selective")
