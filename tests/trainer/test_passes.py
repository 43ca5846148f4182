"""Several passes of every algorithm against a plain loop in float64, and one pass bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_policies import (
    EPSILON,
    RATE,
    GroupOf,
    make_batch,
    make_learner,
    plain_logprobs,
    plain_model,
)
from torch import Tensor, nn

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import token_batch
from asyncrl.trainer.base.errors import NonFiniteError, TrainerError
from asyncrl.trainer.model.packing import PackedBatch

pytestmark = pytest.mark.usefixtures("_checked_once")

ModelPath = Callable[[str], str]

CAP = 2.0


def _compare(model: nn.Module, other: nn.Module) -> None:
    wanted = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), wanted[name].detach(), atol=1e-10, rtol=1e-8)


def _surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "grpo": lambda p, x, b, a: (
        -((x - b).exp().clamp(max=CAP) * _surrogate((p - x).exp(), a, 0.2, 0.2)).sum()
    ),
    "dapo": lambda p, _x, b, a: -_surrogate((p - b).exp(), a, 0.2, 0.28).sum(),
    "rloo": lambda p, _x, b, a: (
        -((p - b).sum().exp().clamp(max=CAP).detach() * a * p).sum() * 4 / 3
    ),
    "reinforce_plus_plus": lambda p, _x, b, a: (
        -((p - b).exp().clamp(max=CAP).detach() * a * p).sum()
    ),
    "gspo": lambda p, _x, b, a: -_surrogate((p - b).mean().exp(), a, 3e-4, 4e-4),
    "cispo": lambda p, _x, b, a: -((p - b).exp().clamp(max=5).detach() * a * p).sum(),
    "gpg": lambda p, _x, b, a: -((p - b).exp().clamp(max=CAP).detach() * a * p).sum(),
}
"""Of a sample: log-probabilities now, at the step's start, when drawn, and its advantage."""


@pytest.mark.parametrize("algorithm", LOSSES)
def test_passes_and_minibatches_of_every_algorithm(
    model_path: ModelPath, group_of: GroupOf, algorithm: str
) -> None:
    path = model_path("qwen3")
    learner = make_learner(path, algorithm=algorithm, ppo_epochs=2, minibatches=2)
    batch = make_batch(group_of, path)
    for group in reversed(batch):
        learner.add_group(*group)
    learner.step()

    policy = plain_model(path)
    optimizer = torch.optim.AdamW(policy.parameters(), RATE, eps=EPSILON, weight_decay=0)
    samples = [one for group, _ in batch for one in group]
    lengths = np.array([len(one.tokens) for one in samples])
    rewards = np.stack([values for _, values in batch])
    centred = rewards - rewards.mean(1, keepdims=True)
    if algorithm == "reinforce_plus_plus":
        advantages = rewards.reshape(-1)
        tokens = np.repeat(advantages, lengths)
        advantages = (advantages - tokens.mean()) / tokens.std()
    elif algorithm in ("rloo", "gpg"):
        advantages = centred.reshape(-1)
    else:
        advantages = (centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)

    def now(one: Trajectory) -> Tensor:
        return plain_logprobs(policy, one.prompt_tokens, one.tokens)

    with torch.no_grad():
        start = [now(one) for one in samples]
    for share in [range(8), range(8, 16)] * 2:
        of_samples = algorithm in ("rloo", "gspo")
        divisor = 8 if of_samples else sum(lengths[i] for i in share)
        for i in share:
            b = torch.tensor(samples[i].behaviour_logprobs).double()
            loss = LOSSES[algorithm](now(samples[i]), start[i], b, float(advantages[i]))
            (loss / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
    _compare(learner.policy.model, policy)


def test_one_pass_is_the_plain_path_bit_for_bit(model_path: ModelPath, group_of: GroupOf) -> None:
    """Forward, loss, backward for each group, in the order in which they come; then one step."""
    path = model_path("qwen3")
    common = {"dtype": "float32", "micro_batch_tokens": 8192, "kl_coefficient": 0.1}
    learner, plain = (make_learner(path, **common) for _ in range(2))
    batch = make_batch(group_of, path)
    for trajectories, rewards in batch:
        learner.add_group(trajectories, rewards)
        ordered = sorted(trajectories, key=lambda t: -(len(t.prompt_tokens) + len(t.tokens)))
        numbers = [trajectories.index(one) for one in ordered]
        packed = PackedBatch.of([(t.prompt_tokens, t.tokens) for t in ordered], torch.device("cpu"))
        scores = plain.policy.score(packed)
        advantages = plain._objective.algorithm.advantages(rewards)[numbers]
        tokens = token_batch(scores.logprobs, ordered, advantages, "token")
        assert plain._models.reference is not None
        with torch.no_grad():
            reference = plain._models.reference.policy.score(packed).logprobs
        object.__setattr__(tokens, "reference_logprobs", reference)
        plain._objective.algorithm.loss(tokens).loss.backward()
        assert not learner._sums.groups[trajectories[0].id.group].fixed  # nothing is held
    learner.step()
    plain._sums.totals.tokens = sum(len(t.tokens) for group, _ in batch for t in group)
    plain._sums.totals.groups = len(batch)
    plain.step()
    for one, other in zip(
        learner.policy.model.parameters(), plain.policy.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_step_that_failed_between_two_updates_is_not_continued(
    model_path: ModelPath, group_of: GroupOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_path("qwen3")
    learner = make_learner(path, ppo_epochs=2)
    for group in make_batch(group_of, path, groups=2):
        learner.add_group(*group)
    loss = learner._objective.algorithm.loss

    def broken(batch: Any) -> Any:
        found = loss(batch)
        return type(found)(found.loss * float("nan"), found.sums, found.parts)

    monkeypatch.setattr(type(learner._objective.algorithm), "loss", lambda _self, b: broken(b))
    with pytest.raises(NonFiniteError, match="group 0"):
        learner.step()
    monkeypatch.undo()
    with pytest.raises(TrainerError, match="restore a checkpoint"):
        learner.add_group(*make_batch(group_of, path, groups=1)[0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_minibatches_are_not_moved_by_the_rounding_of_an_equal_reference(
    model_path: ModelPath, group_of: GroupOf, estimator: str
) -> None:
    """Groups that arrive alone are packed otherwise than those of a minibatch."""
    path, rng = model_path("qwen3"), np.random.default_rng(3)
    learner = make_learner(
        path,
        dtype="bfloat16",
        kl_coefficient=0.1,
        kl_estimator=estimator,
        minibatches=2,
        ppo_epochs=2,
        adam_epsilon=1e-8,
        micro_batch_tokens=4096,
    )
    before = [one.detach().clone() for one in learner.policy.model.parameters()]
    for index in range(8):
        learner.add_group(group_of(index, rng, longest=60), np.ones(4))
    assert learner.step().learning.optimizer_steps == 4
    for old, new in zip(before, learner.policy.model.parameters(), strict=True):
        assert torch.equal(old, new.detach())
