"""docs/migrating.md's rows about losses: TRL's and verl's gradients next to asyncrl's.

The peers' losses are written here from their sources (TRL 1.16.0, verl 0.9.1), on a padded step as
they have it. Where a peer is installed, its own code takes their place, too.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trained_step import Array, Group, step_of, trained

from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.optimizer.optimizer import learning_rate
from asyncrl.trainer.scoring import Reference

PAGE = Path(__file__).resolve().parents[2].joinpath("docs", "migrating.md").read_text("utf-8")
LONGEST = 6
"""Tokens of a padded sample: `max_completion_length`."""
SAMPLES = 4
"""Of a group."""
Settings = Mapping[str, Any]
PLAIN: Settings = {"advantage_normalization": "none"}


class Padded:
    """A step as the peers have it: `[B, T]` log-probabilities and a mask, `[B]` rewards."""

    def __init__(self, step: list[Group], cut: frozenset[int] = frozenset()) -> None:
        self.p, self.drawn, self.reference = (
            torch.zeros(len(step) * SAMPLES, LONGEST, dtype=torch.float64) for _ in range(3)
        )
        self.drawn_tokens = torch.zeros_like(self.p, dtype=torch.bool)
        for row in range(len(self.p)):
            group, one = step[row // SAMPLES], row % SAMPLES
            n = len(group.current[one])
            self.drawn_tokens[row, :n] = True
            self.p[row, :n] = torch.from_numpy(group.current[one])
            self.drawn[row, :n] = torch.from_numpy(group.behaviour[one])
            self.reference[row, :n] = torch.from_numpy(group.reference[one])
        self.p.requires_grad_()
        self.is_cut = torch.tensor([row % SAMPLES in cut for row in range(len(self.p))])
        self.mask = (self.drawn_tokens & ~self.is_cut[:, None]).double()
        self.rewards = torch.from_numpy(np.concatenate([group.rewards for group in step]))
        self.index = np.arange(len(self.p)) // SAMPLES

    def by_group(self, values: Tensor) -> list[Array]:
        """Numbers of drawn tokens, as `trained` has them."""
        halves = zip(values.split(SAMPLES), self.drawn_tokens.split(SAMPLES), strict=True)
        return [one[drawn].numpy() for one, drawn in halves]

    def gradient(self, loss: Tensor) -> list[Array]:
        """Gradient of a loss by log-probability."""
        return self.by_group(torch.autograd.grad(loss, self.p)[0])

    def centred(self) -> Tensor:
        """`[B]` rewards minus their group's mean."""
        return (self.rewards.view(-1, SAMPLES) - self.group_mean(self.rewards)).flatten()

    def group_mean(self, values: Tensor) -> Tensor:
        """`[groups, 1]` means."""
        return values.view(-1, SAMPLES).mean(1, keepdim=True)


def same(mine: list[Array], theirs: list[Array], factor: float = 1.0, rtol: float = 1e-9) -> None:
    """Gradients are equal but for a factor, and not all zero."""
    assert max(np.abs(one).max() for one in mine) > 1e-4
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, factor * other, rtol=rtol, atol=1e-12)


def library(name: str) -> Any:
    """A module of a peer, which `make test-peers` installs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def row_of(key: str) -> str:
    """The page's row about a setting of a peer."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `") and key in line[:200])
    return row


def names(key: str, settings: Settings) -> None:
    """The page's row about `key` names the settings that this test compares with."""
    row = row_of(key)
    for name, value in settings.items():
        assert name in row, (row, name)
        assert not isinstance(value, str) or f"`{value}`" in row or f": {value}`" in row, row


# TRL. `old` is the policy of the step's start, which the trainer scores again: by default the
# current one.
TRL_DEFAULTS: Settings = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
}


def trl_formula(one: Padded, old: Tensor, advantages: Tensor, weight: Any, o: Any) -> Tensor:
    """`GRPOTrainer._compute_loss`."""
    p, mask, a = one.p, one.mask, advantages[:, None]
    ratio = (p - old).exp()
    if o.importance_sampling_level == "sequence":
        ratio = ((p - old) * mask).sum(1, keepdim=True).div(mask.sum(1, keepdim=True)).exp()
    gap = one.reference - p
    kl = (gap.exp() - gap - 1) * (ratio if o.use_bias_correction_kl else 1)
    if o.loss_type == "cispo":
        loss = -ratio.clamp(max=o.epsilon_high).detach() * a * p
    else:
        inside = ratio.clamp(1 - o.epsilon, 1 + o.epsilon_high) * a
        loss = -torch.min(ratio.clamp(max=o.delta or math.inf) * a, inside)
    sums = ((loss * weight + o.beta * kl) * mask).sum(1)
    if o.loss_type == "grpo":
        return (sums / mask.sum(1).clamp(min=1)).mean()
    return sums.mean() / LONGEST if o.loss_type == "dr_grpo" else sums.sum() / mask.sum()


def trl_itself(one: Padded, old: Tensor, advantages: Tensor, weight: Any, o: Any) -> Tensor:
    """The same by TRL, with a trainer that has one process and one batch per step."""
    trainer = library("trl.trainer.grpo_trainer").GRPOTrainer
    few = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    scored = lambda *args, **kwargs: (one.p, one.p.detach(), None)  # noqa: E731
    metrics: Any = {"train": {}}
    metrics["train"] = type("Lists", (dict,), {"__missing__": lambda self, key: []})()
    me = SimpleNamespace(
        _get_per_token_logps_and_entropies=scored, accelerator=few, _metrics=metrics,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level=o.importance_sampling_level, beta=o.beta, loss_type=o.loss_type,
        epsilon_low=o.epsilon, epsilon_high=o.epsilon_high, max_completion_length=LONGEST,
        use_vllm=True, vllm_importance_sampling_correction=True, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=o.delta, use_bias_correction_kl=o.use_bias_correction_kl, steps_per_generation=1
        ),
    )  # fmt: skip
    ids = torch.zeros_like(one.p, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": one.mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": one.reference,
        "importance_sampling_ratio": weight,
        "num_items_in_batch": one.mask.sum(),
    }
    found: Tensor = trainer._compute_loss(me, None, inputs)
    return found


Trl = Callable[[Padded, Tensor, Tensor, Any, Any], Tensor]
PEERS = pytest.mark.peers
of_trl = pytest.mark.parametrize(
    "trl",
    [pytest.param(trl_formula, id="formula"), pytest.param(trl_itself, id="trl", marks=PEERS)],
)
of_both = pytest.mark.parametrize(
    "itself", [pytest.param(False, id="formula"), pytest.param(True, id="itself", marks=PEERS)]
)


def gradient_of_trl(
    trl: Trl, one: Padded, *, old: Tensor | None = None, weight: Any = None, **given: Any
) -> list[Array]:
    options = SimpleNamespace(**{**TRL_DEFAULTS, **given})
    weight = torch.ones_like(one.p[:, :1]) if weight is None else weight
    start = one.p.detach() if old is None else old
    return one.gradient(trl(one, start, one.centred(), weight, options))


BEHAVIOUR: Settings = {"proximal_policy": "behaviour"}


@of_trl
@pytest.mark.parametrize(
    ("key", "theirs", "settings", "factor"),
    [
        ("`loss_type`", {}, {"algorithm": "grpo"}, 1),
        ("`loss_type`", {"loss_type": "bnpo"}, {"loss_normalization": "token"}, 1),
        ("`loss_type`", {"loss_type": "grpo"}, {"loss_normalization": "sequence"}, 1),
        ("`loss_type`", {"loss_type": "dr_grpo"}, {"algorithm": "dr_grpo"}, LONGEST),
        ("`beta`", {"beta": 0.3}, {"kl_coefficient": 0.3, "kl_estimator": "k2"}, 1),
        (
            "`beta`",
            {"beta": 0.3, "use_bias_correction_kl": False},
            {"kl_coefficient": 0.3, "kl_estimator": "k3"},
            1,
        ),
    ],
)
def test_on_policy_gradients_of_trl(
    trl: Trl, key: str, theirs: Settings, settings: Settings, factor: float
) -> None:
    names(key, settings)
    step = step_of(5, spread=0.0)
    got = trained(step, **PLAIN, **settings)[1]
    same(got, gradient_of_trl(trl, Padded(step), **theirs), factor)


@of_trl
@pytest.mark.parametrize(
    ("key", "theirs", "settings"),
    [
        ("`epsilon`", {}, BEHAVIOUR),
        ("`delta`", {"delta": 1.5}, {"dual_clip": 1.5, **BEHAVIOUR}),
        (
            "`loss_type`",
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"algorithm": "cispo", "clip_ratio_high": 4.0},
        ),
        (
            "`importance_sampling_level`",
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"algorithm": "gspo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        ),
    ],
)
def test_ratios_of_trl(trl: Trl, key: str, theirs: Settings, settings: Settings) -> None:
    names(key, {name: one for name, one in settings.items() if one != "behaviour"})
    step = step_of(6, spread=1.5)
    one = Padded(step)
    got = trained(step, **PLAIN, **settings)[1]
    same(got, gradient_of_trl(trl, one, old=one.drawn, **theirs))


@of_trl
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("token_truncate", {"correction": "token_truncated", "importance_cap": 3.0}),
        ("token_mask", {"correction": "token_masked", "correction_band": (0.0, 3.0)}),
        ("sequence_truncate", {"correction": "sequence_truncated", "importance_cap": 3.0}),
        ("sequence_mask", {"correction": "sequence_masked", "correction_band": (0.0, 3.0)}),
    ],
)
def test_trls_corrections_of_the_engines_log_probabilities(
    trl: Trl, mode: str, settings: Settings
) -> None:
    names("`vllm_importance_sampling_correction`", settings)
    step = step_of(7, spread=1.0)
    one = Padded(step)
    gap = (one.p.detach() - one.drawn) * one.mask
    ratio = (gap.sum(1, keepdim=True) if mode.startswith("sequence") else gap).exp()
    weight = ratio.clamp(max=3) if mode.endswith("truncate") else ratio * (ratio <= 3)
    assert (weight != ratio).any()
    same(trained(step, **PLAIN, **settings)[1], gradient_of_trl(trl, one, weight=weight))


@of_trl
def test_masked_samples_leave_trls_denominator_and_not_asyncrls(trl: Trl) -> None:
    assert "denominator" in row_of("`mask_truncated_completions`")
    step, cut = step_of(8, spread=0.0), frozenset({1})
    one = Padded(step, cut)
    share = float(one.mask.sum() / one.drawn_tokens.sum())
    assert share < 1
    got = trained(step, cut=cut, **PLAIN)[1]
    same(got, gradient_of_trl(trl, one), share)
    got = trained(step, cut=cut, **PLAIN, loss_normalization="sequence")[1]
    same(got, gradient_of_trl(trl, one, loss_type="grpo"))


def test_advantages_differ_by_what_is_added_to_the_deviation() -> None:
    assert "1e-4" in row_of("`scale_rewards`")
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    centred, std = rewards - rewards.mean(), rewards.std(ddof=1)
    mine = make(TrainerConfig()).advantages(rewards)
    np.testing.assert_allclose(mine * (std + 1e-6), centred)  # as verl's
    np.testing.assert_allclose(mine, centred / (std + 1e-4), rtol=2e-4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_begins_one_step_later_than_theirs(schedule: str) -> None:
    """TRL's schedules are transformers', whose first rate is 0; verl's are alike."""
    for key in ("`lr_scheduler_type`", ".lr_warmup_steps`"):
        assert "(i + 1) / (w + 1)" in row_of(key)
    transformers = importlib.import_module("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = schedule if schedule != "constant" else "constant_with_warmup"
    theirs = transformers.get_scheduler(name, optimizer, 5, 20).lr_lambdas[0]
    config = TrainerConfig.model_validate(
        {"learning_rate": 1.0, "learning_rate_schedule": schedule, "warmup_steps": 4}
    )
    mine = [learning_rate(config, step, 19) for step in range(19)]
    assert mine == pytest.approx([theirs(step + 1) for step in range(19)])
    assert theirs(0) == 0.0


@of_both
@pytest.mark.parametrize(
    ("alpha", "settings"), [(1.0, {"reference_refresh_steps": 2}), (0.6, {"reference_decay": 0.4})]
)
def test_moving_references_of_trl(itself: bool, alpha: float, settings: Settings) -> None:
    """The same after each step, and after every second one with a mixture of 1."""
    names("`sync_ref_model`", settings)
    policy, mine, theirs = (torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(3))
    theirs.load_state_dict(mine.state_dict())
    first: Any = SimpleNamespace(model=mine)
    trained_now: Any = SimpleNamespace(model=policy)
    reference = Reference(TrainerConfig.model_validate(settings), first)
    for version in (1, 2, 3):
        reference.follow(trained_now, version)
        if version % settings.get("reference_refresh_steps", 1):
            continue
        if itself:
            callbacks = library("trl.trainer.callbacks")
            callbacks.SyncRefModelCallback._sync_target_model(policy, theirs, alpha)
        else:
            for one, other in zip(theirs.parameters(), policy.parameters(), strict=True):
                one.data = alpha * other.data + (1 - alpha) * one.data
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.data, other.data)
        torch.nn.init.normal_(policy.weight)


# verl. `old_log_prob` is that of the step's start, likewise.
def verl_formula(
    one: Padded, old: Tensor, advantages: Tensor, mode: str, agg: str, o: Any
) -> Tensor:
    """`compute_policy_loss_*` and `agg_loss` of `core_algos`."""
    p, mask = one.p, one.mask
    ratio = (p - old).exp()
    if mode == "gspo":
        mean = ((p - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        ratio = mean.detach().exp() * (p - p.detach()).exp()
    inside = ratio.clamp(1 - o.clip_ratio_low, 1 + o.clip_ratio_high)
    loss = torch.max(-advantages * ratio, -advantages * inside)
    if mode == "vanilla":
        dual = torch.min(-advantages * o.clip_ratio_c, loss)
        loss = torch.where(advantages < 0, dual, loss)
    elif mode == "cispo":
        loss = -inside.detach() * advantages * p
    elif mode == "gpg":
        loss = -p * advantages
    sums, lengths = (loss * mask).sum(1), mask.sum(1)
    if agg == "token-mean":
        return sums.sum() / mask.sum()
    per_sample = sums / lengths if agg == "seq-mean-token-mean" else sums
    return per_sample.mean() / (LONGEST if agg.endswith("norm") else 1)


def verl_itself(
    one: Padded, old: Tensor, advantages: Tensor, mode: str, agg: str, o: Any
) -> Tensor:
    """The same by verl."""
    core = library("verl.trainer.ppo.core_algos")
    config = library("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=SAMPLES, ppo_micro_batch_size_per_gpu=1, **vars(o)
    )
    loss: tuple[Tensor, Any] = core.get_policy_loss_fn(mode)(
        old_log_prob=old, log_prob=one.p, advantages=advantages, response_mask=one.mask,
        loss_agg_mode=agg, config=config,
    )  # fmt: skip
    return loss[0]


def gradient_of_verl(
    one: Padded,
    *,
    itself: bool,
    old: Tensor | None = None,
    advantages: Tensor | None = None,
    mode: str = "vanilla",
    agg: str = "token-mean",
    **given: float,
) -> list[Array]:
    usual = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    options = SimpleNamespace(**{**usual, **given})
    verl = verl_itself if itself else verl_formula
    start = one.p.detach() if old is None else old
    a = one.centred()[:, None] if advantages is None else advantages
    return one.gradient(verl(one, start, a * one.mask, mode, agg, options))


@of_both
@pytest.mark.parametrize(
    ("agg", "normalization", "factor"),
    [
        ("token-mean", "token", 1),
        ("seq-mean-token-mean", "sequence", 1),
        ("seq-mean-token-sum", "sample", 1),
        ("seq-mean-token-sum-norm", "sample", LONGEST),
    ],
)
def test_normalizations_of_verl(itself: bool, agg: str, normalization: str, factor: float) -> None:
    names(".loss_agg_mode`", {"loss_normalization": normalization})
    assert agg in row_of(".loss_agg_mode`")
    step = step_of(9, spread=0.0)
    got = trained(step, **PLAIN, loss_normalization=normalization)[1]
    # verl divides by a length of 1e-8 more
    same(got, gradient_of_verl(Padded(step), itself=itself, agg=agg), factor, rtol=1e-7)


@of_both
@pytest.mark.parametrize(
    ("key", "theirs", "settings"),
    [
        (".clip_ratio_c`", {}, {"dual_clip": 3.0, **BEHAVIOUR}),
        (
            ".policy_loss.loss_mode`",
            {"mode": "gspo", "agg": "seq-mean-token-mean"},
            {"algorithm": "gspo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        ),
        (
            ".policy_loss.loss_mode`",
            {"mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
            {"algorithm": "cispo"},
        ),
    ],
)
def test_ratios_of_verl(itself: bool, key: str, theirs: Any, settings: Settings) -> None:
    names(key, {name: one for name, one in settings.items() if one != "behaviour"})
    step = step_of(10, spread=1.5)
    one = Padded(step)
    theirs = gradient_of_verl(one, itself=itself, old=one.drawn, **theirs)
    same(trained(step, **PLAIN, **settings)[1], theirs, rtol=1e-7)


@of_both
def test_gpgs_factor_is_of_samples_with_a_reward_in_verl(itself: bool) -> None:
    assert "samples whose reward is not 0" in row_of("`algorithm.adv_estimator`")
    step = step_of(11, spread=0.0)
    for group in step[:2]:
        group.rewards[:] = [0, 1, 0, 0]
    step[2].rewards[:] = 0
    one = Padded(step)
    if itself:
        core = library("verl.trainer.ppo.core_algos")
        at_end = torch.zeros_like(one.p.detach())
        at_end[:, 0] = one.rewards
        advantages = core.compute_gpg_outcome_advantage(at_end, one.mask, one.index)[0]
    else:
        advantages = (12 / 2 * one.centred())[:, None]
    got = trained(step, algorithm="gpg")[1]
    theirs = gradient_of_verl(one, itself=itself, mode="gpg", advantages=advantages)
    same(got, theirs, (3 / 2) / (12 / 2))


@of_both
@pytest.mark.parametrize(
    ("kind", "estimator"), [("low_var_kl", "k3"), ("mse", "k2"), ("k3+", "k2"), ("k1+", "k2")]
)
def test_penalties_in_verls_loss(itself: bool, kind: str, estimator: str) -> None:
    assert f"`{kind}`" in row_of(".use_kl_loss`")
    names(".use_kl_loss`", {"kl_estimator": estimator})
    step = step_of(12, spread=0.0)
    one = Padded(step)
    if itself:
        kl = library("verl.trainer.ppo.core_algos").kl_penalty(one.p, one.reference, kind)
    elif estimator == "k2":
        kl = 0.5 * (one.p - one.reference).square()
    else:
        kl = (one.reference - one.p).exp() - (one.reference - one.p) - 1
    theirs = one.gradient((kl * one.mask).sum() / one.mask.sum())
    without = trained(step, **PLAIN)[1]
    got = trained(step, **PLAIN, kl_coefficient=1.0, kl_estimator=estimator)[1]
    same([a - b for a, b in zip(got, without, strict=True)], theirs)


@of_both
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "rloo"])
def test_the_penalty_in_verls_reward_is_in_the_baseline(itself: bool, estimator: str) -> None:
    """Without a baseline the two agree: each token loses the penalty of those that follow."""
    row = row_of("`algorithm.use_kl_in_reward`")
    assert "baseline" in row and "`k1`" in row and "`reinforce_plus_plus`" in row  # noqa: PT018
    step, beta = step_of(13, spread=0.0), 0.2
    one = Padded(step)
    kl = beta * (one.p.detach() - one.reference) * one.mask
    to_go = kl.flip(1).cumsum(1).flip(1)
    if estimator == "reinforce_plus_plus":
        raw = (one.rewards[:, None] - to_go)[one.drawn_tokens]
        advantages = (one.rewards[:, None] - to_go - raw.mean()) / raw.std()
    else:
        whole = one.rewards - kl.sum(1)
        others = (whole.view(-1, SAMPLES) - one.group_mean(whole)) * SAMPLES / (SAMPLES - 1)
        advantages = others.flatten()[:, None]
    if itself:
        core = library("verl.trainer.ppo.core_algos")
        at_end = -kl
        ends = one.drawn_tokens.sum(1) - 1
        at_end[torch.arange(len(ends)), ends] += one.rewards
        more = {"index": one.index} if estimator == "rloo" else {}
        advantages, _ = core.get_adv_estimator_fn(estimator)(
            at_end, response_mask=one.mask, config=SimpleNamespace(gamma=1.0), **more
        )
    theirs = gradient_of_verl(one, itself=itself, advantages=advantages)
    settings = {"algorithm": estimator, "kl_coefficient": beta, "kl_estimator": "k1"}
    got = trained(step, **settings, loss_normalization="token")[1]
    if estimator == "reinforce_plus_plus":  # which has the population's deviation
        n = int(one.mask.sum())
        same(got, theirs, math.sqrt(n / (n - 1)), rtol=1e-6)
        return
    means = one.group_mean(kl.sum(1)).repeat_interleave(SAMPLES)
    rest = SAMPLES / (SAMPLES - 1) * (kl.sum(1) - means)
    apart = one.by_group((to_go - rest[:, None]).detach() / one.mask.sum())
    same([mine - other for mine, other in zip(got, theirs, strict=True)], apart)


@of_both
@pytest.mark.parametrize(
    ("level", "correction"), [("token", "token_truncated"), ("sequence", "sequence_truncated")]
)
def test_weights_of_verls_rollout_correction(itself: bool, level: str, correction: str) -> None:
    names("`algorithm.rollout_correction", {"correction": correction, "importance_cap": 2.0})
    step = step_of(14, spread=1.0)
    one = Padded(step)
    gap = one.p.detach() - one.drawn
    if itself:
        helper = library("verl.trainer.ppo.rollout_corr_helper")
        found = helper.compute_rollout_correction_weights(gap, one.mask, level, 2.0)
        weight = found[0]
    else:
        whole = (gap * one.mask).sum(1, keepdim=True)
        weight = (whole if level == "sequence" else gap).exp().clamp(max=2.0)
    advantages = one.centred()[:, None] * weight
    theirs = gradient_of_verl(one, itself=itself, advantages=advantages)
    same(trained(step, **PLAIN, correction=correction)[1], theirs)


@of_both
def test_what_verl_rejects_leaves_its_denominator(itself: bool) -> None:
    assert "denominator" in row_of("`algorithm.rollout_correction")
    step = step_of(15, spread=1.0)
    one = Padded(step)
    inside = ((one.p.detach() - one.drawn).exp() - 2.5).abs() <= 2  # 0.5 to 4.5
    one.mask = one.mask * inside
    share = float(one.mask.sum() / one.drawn_tokens.sum())
    weight = (one.p.detach() - one.drawn).exp()
    theirs = gradient_of_verl(one, itself=itself, advantages=one.centred()[:, None] * weight)
    got = trained(step, **PLAIN, correction="token_masked", correction_band=(0.5, 4.5))[1]
    same(got, theirs, share)
