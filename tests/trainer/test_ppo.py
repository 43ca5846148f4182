"""PPO with a critic against a plain loop in float64.

The loop computes each sample by itself with transformers' own forward pass, holds the whole step,
and takes its optimizer steps with a plain AdamW. Losses and the weights afterwards are compared.
"""

from __future__ import annotations

import dataclasses
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
    make_learner,
    plain_model,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from turns_of import Row, Rows, plain_scores, trained_of, turn_batch

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.critic import value_loss
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.step_targets import advantages_of

pytestmark = pytest.mark.usefixtures("_checked_once")

ModelPath = Callable[[str], str]

CRITIC_RATE, CAP = 3e-2, 2.0


def _values(trunk: Any, head: nn.Linear, rows: Sequence[Row]) -> Tensor:
    """`[N + 1]`: of the states before each generated token, and after the last token."""
    found = []
    for prompt, response, trained in rows:
        row = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        hidden = trunk(input_ids=row[None]).last_hidden_state[0, len(prompt) - 1 :]
        values = head(hidden)[:, 0]
        found.append(values[:-1][torch.from_numpy(trained)])
    return torch.cat([*found, values[-1:]])


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

    def __init__(self, path: str, learner: Learner, settings: dict[str, Any], rows: Rows) -> None:
        self.rows = rows
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
            initial = [plain_scores(self.reference, self.rows[one.id]) for one in samples]
            values = [_values(self.trunk, self.head, self.rows[one.id]) for one in samples]
        counts = trained_of(batch, self.rows)
        advantages, returns = [], []
        for i, one in enumerate(samples):
            if critic.truncated == "terminal" or one.finish_reason == "stop":
                values[i][-1] = 0
            each = torch.zeros(counts[i], dtype=torch.float64)
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
                    loss = loss + self._policy_loss(samples[i], advantages[i], start[i], initial[i])
                    errors = errors + self._value_loss(samples[i], values[i][:-1], returns[i])
                tokens = sum(counts[i] for i in share)
                sums += loss.item(), errors.item(), tokens
                ((loss + critic.value_coefficient * errors) / tokens).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        self._fit_critic(samples, counts, values, returns)
        return float(sums[0] / sums[2]), float(sums[1] / sums[2])

    def _policy(self, one: Trajectory) -> Tensor:
        return plain_scores(self.policy, self.rows[one.id])

    def _fit_critic(
        self,
        samples: list[Trajectory],
        counts: list[int],
        values: list[Tensor],
        returns: list[Tensor],
    ) -> None:
        critic = self.config.critic
        for _pass in range(1, critic.passes):
            for share in np.split(np.arange(len(samples)), critic.minibatches):
                errors = torch.zeros((), dtype=torch.float64)
                for i in share:
                    errors = errors + self._value_loss(samples[i], values[i][:-1], returns[i])
                tokens = sum(counts[i] for i in share)
                (critic.value_coefficient * errors / tokens).backward()
                self.optimizers[1].step()
                self.optimizers[1].zero_grad()

    def _value_loss(self, one: Trajectory, old: Tensor, target: Tensor) -> Tensor:
        clip = self.config.critic.value_clip
        now = _values(self.trunk, self.head, self.rows[one.id])[:-1]
        moved = old + (now - old).clamp(-clip, clip)
        return 0.5 * torch.maximum((now - target) ** 2, (moved - target) ** 2).sum()

    def _policy_loss(
        self, one: Trajectory, advantages: Tensor, start: Tensor, initial: Tensor
    ) -> Tensor:
        config = self.config
        p, b = self._policy(one), torch.tensor(one.behaviour_logprobs[one.trained]).double()
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
        pytest.param({}, {"passes": 3, "minibatches": 2}, id="passes of the critic"),
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
    model_path: ModelPath, settings: dict[str, Any], critic: dict[str, Any]
) -> None:
    """Most samples have several turns; some have several contexts."""
    path = model_path("qwen3")
    settings = {
        "algorithm": "ppo",
        "critic": {"learning_rate": CRITIC_RATE, **critic},
        **settings,
    }
    batch, rows = turn_batch(path, branches=True)
    cut = batch[2][0][1]
    object.__setattr__(cut, "finish_reason", "length")
    learner = make_learner(path, **settings)
    plain = PlainPpo(path, learner, settings, rows)
    for index in (2, 0, 3, 1):  # in any order of arrival
        learner.add_group(*batch[index])
    metrics = learner.step()
    loss, value_loss = plain.step(batch)
    _compare(learner.policy.model, plain.policy)
    found = learner._models.critic
    assert found is not None
    _compare(found.module["head"], plain.head)
    if not found.config.shared_trunk:
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


def _known_values(
    number: int, rng: np.random.Generator, version: int, made: GroupOf
) -> tuple[Group, list[np.ndarray]]:
    """A group, and the true value of each state of its samples.

    Half of the reward depends on the prompt, half on the first token: before that is drawn, the
    value is the prompt's half and a quarter.
    """
    hard = int(rng.integers(2))
    prompt = rng.integers(3 + 3 * hard, 6 + 3 * hard, rng.integers(2, 6)).astype(np.int32)
    group, rewards, values = [], [], []
    for one in made(number, rng, version=version, longest=12):
        first = int(rng.integers(2))
        tokens = rng.integers(12, 32, len(one.tokens)).astype(np.int32)
        tokens[0] = 10 + first
        group.append(dataclasses.replace(one, prompt_tokens=prompt, tokens=tokens))
        rewards.append((hard + first) / 2)
        before, after = hard / 2 + 0.25, np.full(len(tokens) - 1, rewards[-1])
        values.append(np.concatenate([[before], after]))
    return (group, np.array(rewards)), values


def test_a_critic_learns_values_that_are_known(model_path: ModelPath, group_of: GroupOf) -> None:
    """Fresh samples in each step, in float32 and fused as in a run: nothing can be memorised."""
    critic = {"learning_rate": 3e-3, "gae_lambda": 0.95, "head_start_steps": 100}
    settings = {"algorithm": "ppo", "device": "cpu", "learning_rate": 1e-5}
    config = TrainerConfig.model_validate(
        settings | {"critic": critic | {"passes": 4, "minibatches": 4}}
    )
    learner = Learner(config, model_path("qwen3"), group_size=4, seed=0)
    assert learner.policy.is_fused
    before = [one.clone() for one in learner.policy.model.parameters()]
    rng, explained = np.random.default_rng(0), []
    for step in range(8):
        for number in range(8):
            (group, rewards), _ = _known_values(8 * step + number, rng, step, group_of)
            learner.add_group(group, rewards)
        explained.append(learner.step().algorithm["explained_variance"])
    assert explained[0] == pytest.approx(0)
    assert min(explained[-2:]) > 0.5
    made = [_known_values(100 + number, rng, 8, group_of) for number in range(16)]
    samples = [one for (group, _), _ in made for one in group]
    known = np.concatenate([one for _, values in made for one in values])
    assert learner._models.critic is not None
    with torch.no_grad():
        found = learner._models.critic.values(samples).tokens.numpy()
    assert np.var(found - known) < 0.3 * np.var(known)
    firsts = np.cumsum([0, *(len(one.tokens) for one in samples[:-1])])
    rewards = np.concatenate([rewards for (_, rewards), _ in made])
    luck = rewards - known[firsts]
    leaked = np.mean((found - known)[firsts] * luck) / np.mean(luck**2)
    assert abs(leaked) < 0.1, "the first state does not know the token that is drawn in it"
    for one, other in zip(before, learner.policy.model.parameters(), strict=True):
        assert torch.equal(one, other), "these were steps of the critic alone"


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
    found, _ = advantages_of(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    assert len(found) == 0


def test_a_value_near_the_old_one_is_not_counted_as_clipped() -> None:
    old, returns = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1))
    values, ones = old * 0.3 + 0.05, torch.ones(4096)
    far = (values - old).abs() > 1.0
    found = value_loss(values, old, returns, ones, 1.0)
    near, moved = (values[far] - returns[far]).square(), old + (values - old).clamp(-1, 1)
    worse = (moved[far] - returns[far]).square() > near
    assert found.sums["value_clipped"] == worse.sum()
