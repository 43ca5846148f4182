"""The KL penalty against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from asyncrl.rollout.truncation import Truncation
from asyncrl.trainer.algorithms.base import TokenBatch
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.model.head import LogitMap, Processing, process


def _batch(log_ratio: float, weight: float, *, advantage: float = 0.0) -> TokenBatch:
    """One token whose probability under the reference is exp(log_ratio) times the policy's."""
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    return TokenBatch(
        logprobs=logprob,
        behaviour_logprobs=logprob.detach(),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        weights=torch.tensor([weight], dtype=torch.float64),
        reference_logprobs=logprob.detach() + log_ratio,
    )


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
@pytest.mark.parametrize(("log_ratio", "weight"), [(0.0, 1.0), (0.5, 1.0), (-2.0, 0.25)])
def test_penalty_and_gradient_are_k3s(algorithm: str, log_ratio: float, weight: float) -> None:
    batch = _batch(log_ratio, weight)
    penalised = make(TrainerConfig(algorithm=algorithm, kl_coefficient=0.5))
    sums = penalised.loss(batch)
    sums.loss.backward()
    k3 = math.exp(log_ratio) - 1 - log_ratio
    assert float(sums.loss.detach()) == pytest.approx(0.5 * weight * k3)
    # d k3 / d log p = 1 - r / p
    assert batch.logprobs.grad is not None
    assert float(batch.logprobs.grad) == pytest.approx(0.5 * weight * (1 - math.exp(log_ratio)))
    assert float(sums.sums["reference_kl"]) == pytest.approx(k3)


def test_the_algorithms_own_loss_and_signals_stay() -> None:
    plain = make(TrainerConfig())
    penalised = make(TrainerConfig(kl_coefficient=0.5))
    batch = _batch(0.5, 1.0, advantage=2.0)
    own, both = plain.loss(batch), penalised.loss(batch)
    assert float(both.sums["policy_loss"]) == float(own.loss.detach())
    assert both.sums.keys() == penalised.signals.keys()
    assert penalised.signals.keys() == plain.signals.keys() | {"policy_loss", "reference_kl"}
    assert (plain.needs_reference, penalised.needs_reference) == (False, True)


def test_a_batch_without_reference_is_refused() -> None:
    batch = TokenBatch(*[torch.zeros(1)] * 4)
    with pytest.raises(ValueError, match="reference_logprobs"):
        make(TrainerConfig(kl_coefficient=0.5)).loss(batch)


def test_kl_of_two_nuclei_is_finite_and_bounded_from_below() -> None:
    """The definition of `asyncrl.trainer.algorithms.reference_kl`, on the head's results."""
    nucleus = Processing(LogitMap(), Truncation(top_p=0.9))
    everything = torch.arange(12)
    generator = torch.Generator().manual_seed(1)
    apart = 0
    for shift in (0.0, 0.2, 0.5, 1.0, 2.0, 0.3, 0.4, 0.6):
        logits = 2 * torch.randn(12, generator=generator, dtype=torch.float64)
        other = logits + shift * torch.randn(12, generator=generator, dtype=torch.float64)
        rows = [one.expand(12, 12) for one in (logits, other)]
        p, r = (process(one, everything, nucleus) for one in rows)
        q = torch.softmax(other, -1)
        mass = q[~r.outside].sum()
        defined = torch.where(r.outside, q / (mass + q), q / mass)
        torch.testing.assert_close(r.logprobs.exp(), defined)
        inside = ~p.outside
        chance = p.logprobs[inside].exp()
        assert float(chance.sum()) == pytest.approx(1)
        value = float((chance * (p.logprobs - r.logprobs)[inside]).sum())
        assert math.log(0.9) <= value < math.inf
        if bool((inside & r.outside).any()):
            apart += 1
        else:
            assert value >= -1e-12
    assert apart, "no pair had another set of tokens"


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("clamp", [10.0, 1e6])
def test_a_token_beyond_the_clamp_has_no_gradient_however_far_it_is(
    estimator: str, clamp: float
) -> None:
    """e^gap is infinite in float32 from 88.7 nats on."""
    logprob = torch.tensor([-20_001.0], requires_grad=True)
    batch = TokenBatch(logprob, logprob.detach(), torch.zeros(1), torch.ones(1))
    batch = dataclasses.replace(batch, reference_logprobs=torch.tensor([-1.0]))
    config = TrainerConfig.model_validate(
        {"kl_coefficient": 0.1, "kl_clamp": clamp, "kl_estimator": estimator}
    )
    sums = make(config).loss(batch)
    sums.loss.backward()
    assert logprob.grad is not None
    assert float(sums.loss.detach()) == pytest.approx(0.1 * clamp)
    assert float(logprob.grad) == 0
