"""What gradients estimate: their exact expectations under a small policy that can be enumerated.

A policy over three tokens, of which token 2 ends a sample of at most three, has 15 samples. All
pairs of samples are all possible steps of one group of two. The loss of a step is linear in the
weights of its tokens, so one backward pass over all pairs, with each pair's probability in its
weights, gives the exact expectation of the gradient.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import TokenBatch, denominator
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.objective.bias_analysis import biases_of
from asyncrl.trainer.step_targets import advantages_of, token_rewards

END, LONGEST = 2, 3
PREFIXES = [p for n in range(LONGEST) for p in itertools.product((0, 1), repeat=n)]
SAMPLES = [(*p, END) for p in PREFIXES] + list(itertools.product((0, 1), repeat=LONGEST))
REWARDS = np.random.default_rng(3).normal(size=len(SAMPLES))
ROWS = [[PREFIXES.index(s[:t]) for t in range(len(s))] for s in SAMPLES]


def table(seed: int, size: float = 1.0) -> Tensor:
    """`[prefixes, 3]` logits."""
    values = np.random.default_rng(seed).normal(size=(len(PREFIXES), 3)) * size
    return torch.tensor(values)


POLICY = table(1)
OLDER = POLICY + table(2, 0.3)
REFERENCE = table(7, 0.7)


def token_logprobs(logits: Tensor) -> list[Tensor]:
    """Of each sample."""
    logp = torch.log_softmax(logits, -1)
    return [logp[rows, list(s)] for rows, s in zip(ROWS, SAMPLES, strict=True)]


def chances(logits: Tensor) -> Tensor:
    """`[samples]` probabilities."""
    return torch.stack([one.sum() for one in token_logprobs(logits)]).exp()


def gradient_of(value: Any) -> Tensor:
    """Of a function of logits, at the policy."""
    logits = POLICY.clone().requires_grad_()
    (grad,) = torch.autograd.grad(value(logits), logits)
    return grad


def expected_gradient(config: TrainerConfig, behaviour: Tensor = POLICY) -> Tensor:
    """Of the loss of a step of one group of two, over all pairs that `behaviour` may draw."""
    algorithm = make(config)
    logits = POLICY.clone().requires_grad_()
    now = token_logprobs(logits)
    drawn, reference = token_logprobs(behaviour), token_logprobs(REFERENCE)
    chance = chances(behaviour).numpy()
    columns: list[list[Tensor]] = [[], [], [], [], [], []]
    for pair in itertools.product(range(len(SAMPLES)), repeat=2):
        lengths = np.array([len(SAMPLES[i]) for i in pair])
        advantages = algorithm.advantages(REWARDS[list(pair)])
        kind = config.loss_normalization
        divisor = denominator(kind, tokens=int(lengths.sum()), samples=2)
        weights = 1.0 / lengths if kind == "sequence" else np.ones(2)
        weights = weights * chance[list(pair)].prod() / divisor
        for position, i in enumerate(pair):
            size = (len(SAMPLES[i]),)
            number = len(columns[0])
            for column, one in zip(
                columns,
                (
                    now[i],
                    drawn[i],
                    torch.full(size, advantages[position], dtype=torch.float64),
                    torch.full(size, weights[position], dtype=torch.float64),
                    reference[i],
                    torch.full(size, number),
                ),
                strict=True,
            ):
                column.append(one)
    batch = TokenBatch(*[torch.cat(column) for column in columns])
    (grad,) = torch.autograd.grad(algorithm.loss(batch).loss, logits)
    return -grad


TRUE = gradient_of(lambda logits: (chances(logits) * torch.tensor(REWARDS)).sum())


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def measured(behaviour: Tensor = POLICY, **settings: Any) -> float:
    return cosine(expected_gradient(TrainerConfig.model_validate(settings), behaviour), TRUE)


def test_only_the_samples_as_denominator_are_unbiased() -> None:
    got = {
        kind: measured(algorithm="reinforce", loss_normalization=kind)
        for kind in ("sample", "token", "sequence")
    }
    assert got["sample"] == pytest.approx(1, abs=1e-12)
    assert got["sequence"] < got["token"] < 0.999
    assert measured(algorithm="grpo") == pytest.approx(0.9867, abs=5e-5)  # as docs and lines say
    # Not only the direction: the leave-one-out baseline gives the very gradient.
    rloo = expected_gradient(TrainerConfig(algorithm="rloo"))
    torch.testing.assert_close(rloo, TRUE, atol=1e-12, rtol=1e-10)
    centred = expected_gradient(TrainerConfig(algorithm="dr_grpo"))
    torch.testing.assert_close(2 * centred, TRUE, atol=1e-12, rtol=1e-10)


def test_stale_tokens_need_the_weight_of_the_whole_sample() -> None:
    far = {"algorithm": "rloo", "importance_cap": 1e6}
    grad = expected_gradient(TrainerConfig.model_validate(far), OLDER)
    torch.testing.assert_close(grad, TRUE, atol=1e-12, rtol=1e-10)
    biased = [
        measured(OLDER, algorithm="rloo", correction=one, **cap)
        for one, cap in (
            ("token_truncated", {"importance_cap": 1e6}),
            ("token_masked", {"correction_band": [0.5, 5.0]}),
            ("sequence_truncated", {"importance_cap": 1.0}),
            ("sequence_rejected", {}),
            ("none", {}),
        )
    ]
    assert max(biased) < 0.9999
    assert min(biased) > 0


@pytest.mark.parametrize(
    "algorithm", ["grpo", "dr_grpo", "dapo", "reinforce", "rloo", "gspo", "cispo"]
)
@pytest.mark.parametrize("normalization", ["token", "sequence", "sample"])
@pytest.mark.parametrize("advantages", ["std", "none"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_run_says_of_each_combination_whether_it_is_biased(
    algorithm: str, normalization: str, advantages: str, stale: bool
) -> None:
    """Those whose factors depend on several groups cannot be seen in a step of one."""
    values: dict[str, Any] = {"algorithm": algorithm, "loss_normalization": normalization}
    default = TrainerConfig(algorithm=algorithm)
    if algorithm in ("grpo", "dapo", "gspo", "cispo"):  # others refuse the one or the other
        values["advantage_normalization"] = advantages
    if default.proximal_policy == "current":
        values["importance_cap"] = 1e6
    config = TrainerConfig.model_validate(values)
    biases = biases_of(config, stale=stale)
    grad = expected_gradient(config, OLDER if stale else POLICY)
    assert (cosine(grad, TRUE) > 1 - 1e-10) == (not biases)


@pytest.mark.parametrize(
    "correction", get_args(TrainerConfig.model_fields["correction"].annotation)
)
def test_corrections_do_nothing_on_policy(correction: str) -> None:
    assert measured(algorithm="rloo", correction=correction) == pytest.approx(1, abs=1e-12)


def test_what_the_gradients_of_k1_k2_and_k3_are() -> None:
    """The reward is 0 wherever advantages are, so their part is subtracted."""

    def part(estimator: str, **settings: Any) -> Tensor:
        values = {"algorithm": "rloo", "kl_coefficient": 0.5, "kl_estimator": estimator, **settings}
        with_kl = expected_gradient(TrainerConfig.model_validate(values))
        return (TRUE - with_kl) / 0.5

    def kl_of_samples(logits: Tensor) -> Tensor:
        p, q = chances(logits), chances(REFERENCE)
        return (p * (p / q).log()).sum()

    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for rows, chance in zip(ROWS, chances(POLICY), strict=True):
        visits[rows] += chance

    def kl_of_tokens(logits: Tensor, *, reverse: bool) -> Tensor:
        """At the prefixes that the policy visits, as if these were fixed."""
        p, q = torch.log_softmax(logits, -1), torch.log_softmax(REFERENCE, -1)
        first, second = (p, q) if reverse else (q, p)
        return (visits * (first.exp() * (first - second)).sum(-1)).sum()

    close = {"atol": 1e-12, "rtol": 1e-9}
    torch.testing.assert_close(part("k1"), gradient_of(kl_of_samples), **close)
    for estimator, reverse in (("k2", True), ("k3", False)):
        want = gradient_of(lambda logits, reverse=reverse: kl_of_tokens(logits, reverse=reverse))
        torch.testing.assert_close(part(estimator), want, **close)


def _ppo_gradient(**settings: Any) -> Tensor:
    """Expected gradient of PPO's loss on one sample, with values that are far from the truth."""
    config = TrainerConfig.model_validate({"algorithm": "ppo", **settings})
    algorithm = make(config)
    logits = POLICY.clone().requires_grad_()
    of_prefix = np.random.default_rng(8).normal(size=len(PREFIXES))
    total = torch.zeros((), dtype=torch.float64)
    chance = chances(POLICY)
    for i, logprobs in enumerate(token_logprobs(logits)):
        size = len(SAMPLES[i])
        found, _ = advantages_of(
            token_rewards(REWARDS[[i]], np.array([size])),
            of_prefix[ROWS[i]],
            np.array([size]),
            gamma=config.critic.gamma,
            gae_lambda=config.critic.gae_lambda,
        )
        kind = config.loss_normalization
        weight = 1.0 / size if kind == "sequence" else 1.0
        weight /= denominator(kind, tokens=size, samples=1)
        batch = TokenBatch(
            logprobs,
            logprobs.detach(),
            torch.tensor(found),
            torch.full((size,), weight, dtype=torch.float64),
        )
        total = total + chance[i] * algorithm.loss(batch).loss
    (grad,) = torch.autograd.grad(total, logits)
    return -grad


@pytest.mark.parametrize("kind", ["token", "sequence", "sample"])
@pytest.mark.parametrize("critic", [{}, {"gae_lambda": 1.0}, {"gae_lambda": 1.0, "gamma": 0.9}])
def test_a_critic_is_unbiased_only_as_a_baseline(kind: str, critic: dict[str, float]) -> None:
    settings = {"advantage_normalization": "none", "loss_normalization": kind, "critic": critic}
    biases = biases_of(TrainerConfig.model_validate({"algorithm": "ppo", **settings}), stale=False)
    assert (cosine(_ppo_gradient(**settings), TRUE) > 1 - 1e-10) == (not biases)


@pytest.mark.parametrize(
    ("settings", "biases"),
    [
        ({"mask_truncated_completions": True}, ("mask_truncated_completions",)),
        ({"kl_coefficient": 0.1}, ("kl_coefficient",)),
        ({"router_loss_coefficient": 0.1}, ("router_loss_coefficient",)),
        (
            {
                "algorithm": "ppo",
                "advantage_normalization": "none",
                "loss_normalization": "sample",
                "critic": {"gae_lambda": 1.0, "shared_trunk": True},
            },
            ("critic.shared_trunk",),
        ),
    ],
)
def test_other_objectives_are_named(settings: dict[str, Any], biases: tuple[str, ...]) -> None:
    config = TrainerConfig.model_validate({"algorithm": "rloo", **settings})
    assert biases_of(config, stale=False) == biases


def test_in_a_single_pass_nothing_is_clipped_towards_the_step() -> None:
    """Stale tokens of `dapo` with `proximal_policy: current` have `token_truncated`."""
    config = TrainerConfig(algorithm="dapo", proximal_policy="current")
    assert biases_of(config, stale=True)[-1] == "stale tokens weighed one by one"


def test_further_updates_are_said_to_be_off_policy() -> None:
    """Of fresh samples: the second minibatch is stale, the second epoch has been learnt from."""
    exact = {"algorithm": "rloo", "importance_cap": 1e6}
    found = {
        name: biases_of(TrainerConfig.model_validate(exact | settings), stale=False)
        for name, settings in {
            "one": {},
            "minibatches": {"minibatches": 2},
            "capped": {"minibatches": 2, "importance_cap": 2.0},
            "epochs": {"ppo_epochs": 2},
        }.items()
    }
    assert found == {
        "one": (),
        "minibatches": (),
        "capped": ("stale samples beyond importance_cap",),
        "epochs": ("samples seen before",),
    }
