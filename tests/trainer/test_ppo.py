"""PPO with a critic against a plain loop in float64.

The loop computes each sample by itself with transformers' own forward pass, holds the whole step,
and takes its optimizer steps with a plain AdamW. Losses and the weights afterwards are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from plain_policies import (
    COMMON,
    EPSILON,
    RATE,
    Group,
    GroupOf,
    make_batch,
    make_learner,
    plain_logprobs,
    plain_model,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollout.trajectory import Trajectory
from trainer.config import TrainerConfig
from trainer.errors import UnsupportedModelError
from trainer.gae import advantages_of
from trainer.learner import Learner
from trainer.policy import Policy

ModelPath = Callable[[str], str]

CRITIC_RATE, CAP = 3e-2, 2.0


def _values(trunk: Any, head: nn.Linear, one: Trajectory) -> Tensor:
    """`[L + 1]`: of the states before each token, and after the last one."""
    row = torch.from_numpy(np.concatenate([one.prompt_tokens, one.tokens]).astype(np.int64))
    hidden = trunk(input_ids=row[None]).last_hidden_state[0, len(one.prompt_tokens) - 1 :]
    return head(hidden)[:, 0]


def _whitened(rows: list[Tensor]) -> list[Tensor]:
    flat = torch.cat(rows)
    mean, std = flat.mean(), flat.std(correction=0)
    return [(row - mean) / std for row in rows]


def _recursion(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    out, running = torch.zeros(len(rewards), dtype=torch.float64), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] - values[t]
        running = delta + gamma * lam * running
        out[t] = running
    return out


class PlainPpo:
    """The published algorithm over a whole step, one sample at a time."""

    def __init__(self, path: str, learner: Learner, settings: dict[str, Any]) -> None:
        self.config = TrainerConfig.model_validate(COMMON | settings)
        self.policy = plain_model(path)
        self.reference = plain_model(path)
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():  # otherwise the first step has no KL
            for one in self.reference.parameters():
                one += 0.05 * torch.randn(one.shape, generator=generator, dtype=torch.float64)
        if (reference := learner._models.reference) is not None:
            reference.policy.model.load_state_dict(self.reference.state_dict())
        own = plain_model(path)
        shared = self.config.critic.shared_trunk
        self.trunk = (self.policy if shared else own).base_model
        self.head = nn.Linear(32, 1, dtype=torch.float64)
        critic = learner._models.critic
        assert critic is not None
        with torch.no_grad():  # the head starts at 0, where the trunk would have no gradient
            critic._head.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(4))
            self.head.load_state_dict(critic._head.state_dict())
        critic_parameters = [*self.head.parameters(), *([] if shared else self.trunk.parameters())]
        self.optimizers = [
            torch.optim.AdamW(self.policy.parameters(), RATE, eps=EPSILON, weight_decay=0),
            torch.optim.AdamW(critic_parameters, CRITIC_RATE, eps=EPSILON, weight_decay=0),
        ]

    def step(self, batch: Sequence[Group]) -> tuple[float, float]:
        """Losses of policy and values per token, means over the updates."""
        config, critic = self.config, self.config.critic
        samples = [one for group, _ in batch for one in group]
        rewards = np.concatenate([values for _, values in batch])
        with torch.no_grad():
            start = [self._policy(one) for one in samples]
            initial = [
                plain_logprobs(self.reference, one.prompt_tokens, one.tokens) for one in samples
            ]
            values = [_values(self.trunk, self.head, one) for one in samples]
        advantages, returns = [], []
        for i, one in enumerate(samples):
            if critic.truncated == "terminal" or one.finish_reason == "stop":
                values[i][-1] = 0
            each = torch.zeros(len(one.tokens), dtype=torch.float64)
            each[-1] = rewards[i]
            if config.kl_estimator == "k1":
                each -= config.kl_coefficient * (start[i] - initial[i])
            advantages.append(_recursion(each, values[i], critic.gamma, critic.gae_lambda))
            returns.append(advantages[i] + values[i][:-1])
        if config.advantage_normalization == "std":
            advantages = _whitened(advantages)
        sums = np.zeros(3)
        for _epoch in range(config.ppo_epochs):
            for share in np.split(np.arange(len(samples)), config.minibatches):
                loss, errors = torch.zeros(2, dtype=torch.float64)
                for i in share:
                    old, target = values[i][:-1], returns[i]
                    loss = loss + self._policy_loss(samples[i], advantages[i], start[i], initial[i])
                    now = _values(self.trunk, self.head, samples[i])[:-1]
                    moved = old + (now - old).clamp(-critic.value_clip, critic.value_clip)
                    worst = torch.maximum((now - target) ** 2, (moved - target) ** 2)
                    errors = errors + 0.5 * worst.sum()
                tokens = sum(len(samples[i].tokens) for i in share)
                sums += loss.item(), errors.item(), tokens
                ((loss + critic.value_coefficient * errors) / tokens).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return float(sums[0] / sums[2]), float(sums[1] / sums[2])

    def _policy(self, one: Trajectory) -> Tensor:
        return plain_logprobs(self.policy, one.prompt_tokens, one.tokens)

    def _policy_loss(
        self, one: Trajectory, advantages: Tensor, start: Tensor, initial: Tensor
    ) -> Tensor:
        config = self.config
        p, b = self._policy(one), torch.tensor(one.behaviour_logprobs).double()
        if config.proximal_policy == "current":
            ratio, weight = (p - start).exp(), (start - b).exp().clamp(max=CAP)
        else:
            ratio, weight = (p - b).exp(), torch.ones(len(b), dtype=torch.float64)
        low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if config.dual_clip is not None:
            floor = torch.where(advantages < 0, config.dual_clip * advantages, -torch.inf)
            surrogate = torch.maximum(surrogate, floor)
        loss = -(weight * surrogate).sum()
        if config.kl_coefficient and config.kl_estimator == "k3":
            gap = initial - p
            loss = loss + config.kl_coefficient * (gap.exp() - 1 - gap).sum()
        return loss


def _compare(model: nn.Module, other: nn.Module) -> None:
    wanted = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[name].detach(), atol=1e-10, rtol=1e-8)


SHARED = {"shared_trunk": True}


@pytest.mark.parametrize(
    ("settings", "critic"),
    [
        pytest.param({}, {}, id="streamed"),
        pytest.param({"kl_coefficient": 0.3, "kl_estimator": "k1"}, {}, id="kl in reward"),
        pytest.param({"kl_coefficient": 0.3}, SHARED, id="kl in loss, shared trunk"),
        pytest.param({"advantage_normalization": "none"}, SHARED, id="nothing over the step"),
        pytest.param(
            {"proximal_policy": "behaviour", "dual_clip": 1.5},
            {"gamma": 0.9},
            id="clip to behaviour",
        ),
        pytest.param({"ppo_epochs": 2, "minibatches": 2}, {"value_clip": 0.01}, id="passes"),
        pytest.param(
            {"ppo_epochs": 2, "advantage_normalization": "none", "clip_ratio_low": 0.05},
            {"truncated": "bootstrap", "gae_lambda": 1.0},
            id="first pass streams",
        ),
        pytest.param(
            {"minibatches": 4, "kl_coefficient": 0.3, "kl_estimator": "k1"},
            {"truncated": "bootstrap", **SHARED},
            id="minibatches, shared trunk",
        ),
    ],
)
def test_a_step_is_that_of_a_plain_loop(
    model_path: ModelPath, group_of: GroupOf, settings: dict[str, Any], critic: dict[str, Any]
) -> None:
    path = model_path("qwen3")
    settings = {
        "algorithm": "ppo",
        "critic": {"learning_rate": CRITIC_RATE, **critic},
        **settings,
    }
    batch = make_batch(group_of, path)
    cut = batch[2][0][1]
    object.__setattr__(cut, "finish_reason", "length")
    learner = make_learner(path, **settings)
    plain = PlainPpo(path, learner, settings)
    for index in (2, 0, 3, 1):  # in any order of arrival
        learner.add_group(*batch[index])
    metrics = learner.step()
    loss, value_loss = plain.step(batch)
    _compare(learner.policy.model, plain.policy)
    found = learner._models.critic
    assert found is not None
    _compare(found.module["head"], plain.head)
    if not found.shares_trunk:
        _compare(found.module["trunk"], plain.trunk)
    else:
        loss += found.config.value_coefficient * value_loss
    assert metrics.learning.loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert metrics.algorithm["value_loss"] == pytest.approx(value_loss, rel=1e-9)
    assert metrics.learning.optimizer_steps == learner._config.updates_per_step
    assert metrics.algorithm["explained_variance"] is not None
    clipped = metrics.algorithm["clip_ratio"]
    assert clipped is not None
    assert (clipped > 0) == (metrics.learning.optimizer_steps > 1 or "proximal_policy" in settings)


def test_a_critic_learns_the_rewards_of_an_unchanged_policy(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    path = model_path("qwen3")
    critic = {
        "learning_rate": 1.5e-2,
        "head_start_steps": 100,
        "gae_lambda": 1.0,
        "warmup_steps": 1,
    }
    learner = make_learner(path, algorithm="ppo", critic=critic, adam_epsilon=1e-8)
    before = [one.clone() for one in learner.policy.model.parameters()]
    batch = make_batch(group_of, path, groups=2)
    found = []
    for _ in range(20):
        for group in batch:
            learner.add_group(*group)
        found.append(learner.step().algorithm)
    first, last = found[0], found[-1]
    assert first["explained_variance"] == pytest.approx(0)
    assert last["explained_variance"] is not None
    assert last["explained_variance"] > 0.5
    assert last["value_loss"] is not None
    assert first["value_loss"] is not None
    assert last["value_loss"] < 0.5 * first["value_loss"]
    for one, other in zip(before, learner.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_critic_of_a_smaller_vocabulary_is_refused(model_path: ModelPath, tmp_path: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path("qwen3"))
    model.resize_token_embeddings(31)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="vocabulary of 31 tokens"):
        make_learner(model_path("qwen3"), algorithm="ppo", critic={"model": str(tmp_path)})


def test_hidden_states_that_cannot_be_had_are_not_shared(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "has_plain_head", False)
    with pytest.raises(UnsupportedModelError, match="shared_trunk: false"):
        make_learner(model_path("qwen3"), algorithm="ppo", critic=SHARED)


def test_without_samples_there_are_no_advantages() -> None:
    found = advantages_of(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    assert len(found.advantages) == 0
