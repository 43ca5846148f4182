"""`mask_truncated_completions`: samples that were cut off have no gradient, and are counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from plain_policies import GroupOf, make_learner

ModelPath = Callable[[str], str]


@pytest.mark.parametrize("normalization", ["token", "sequence", "sample"])
@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_plus_plus", "ppo"])
def test_samples_that_were_cut_off_are_masked_and_stay_in_the_denominator(
    model_path: ModelPath, group_of: GroupOf, algorithm: str, normalization: str
) -> None:
    """The gradient is that of the others, as parts of the whole group."""
    own = {"critic": {"passes": 2}} if algorithm == "ppo" else {}
    learner = make_learner(
        model_path("qwen3"), algorithm=algorithm, loss_normalization=normalization, **own,
        mask_truncated_completions=True,
    )  # fmt: skip
    group = group_of(0, np.random.default_rng(0))
    cut = [dataclasses.replace(one, finish_reason="length") for one in group]
    rewards = np.arange(4, dtype=np.float32)

    def gradients(chosen: list[int]) -> list[torch.Tensor]:
        """With these samples not cut off, before the division; the denominator is not theirs."""
        learner.discard()
        learner.add_group([group[i] if i in chosen else cut[i] for i in range(4)], rewards)
        assert learner._sums.totals.tokens == sum(len(one.tokens) for one in group)
        assert learner._sums.totals.samples == 4
        return [p.grad.clone() for p in learner.policy.model.parameters() if p.grad is not None]

    whole, some, rest = gradients([0, 1, 2, 3]), gradients([0, 2]), gradients([1, 3])
    assert any(bool(one.any()) for one in some)
    for one, first, second in zip(whole, some, rest, strict=True):
        torch.testing.assert_close(one, first + second, atol=1e-12, rtol=1e-9)
    assert not any(bool(one.any()) for one in gradients([]))
    critic = learner._models.critic
    before = None if critic is None else [p.detach().clone() for p in critic.module.parameters()]
    metrics = learner.step()
    assert metrics.batch.truncated_share == 1
    if critic is not None and before is not None:
        assert all(map(torch.equal, before, critic.module.parameters()))
