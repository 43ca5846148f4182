"""The gradient of a step: the same in whatever order and pieces the batch arrives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import BatchError
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.objective.step_statistics import rounded_length
from asyncrl.trainer.optimizer.optimizer import scale_and_clip

pytestmark = pytest.mark.usefixtures("_checked_once")

Group = tuple[list[Trajectory], np.ndarray]
GroupOf = Callable[..., list[Trajectory]]
ModelPath = Callable[[str], str]

SIGNALS = {
    "clip_ratio", "dual_clipped", "importance_capped", "effective_share", "chi_squared",
    "correction_masked",
}  # fmt: skip
"""Of GRPO with its correction."""


def _learner(path: str, **settings: Any) -> Learner:
    arguments = {k: settings.pop(k) for k in ("temperature", "truncation") if k in settings}
    values = {"dtype": "float64", "learning_rate": 1e-3, "device": "cpu"} | settings
    return Learner(TrainerConfig.model_validate(values), path, group_size=4, seed=1, **arguments)


def _batch(group_of: GroupOf, *, seed: int = 0, groups: int = 5, version: int = 0) -> list[Group]:
    """Groups with random rewards; the second one has no signal."""
    rng = np.random.default_rng(seed)
    out = []
    for index in range(groups):
        rewards = np.ones(4) if index == 1 else rng.normal(size=4)
        out.append((group_of(index, rng, version=version), rewards.astype(np.float32)))
    return out


def _gradient(learner: Learner, batch: Sequence[Group]) -> dict[str, torch.Tensor]:
    """The step's gradient as AdamW would get it, unclipped."""
    for trajectories, rewards in batch:
        learner.add_group(trajectories, rewards)
    denominator = learner._sums.finish(learner.world)
    scale_and_clip(learner.policy.model.parameters(), denominator, float("inf"))
    return {
        n: p.grad.clone() for n, p in learner.policy.model.named_parameters() if p.grad is not None
    }


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    mean = x.square().mean(-1, keepdim=True)
    return module.weight * x * torch.rsqrt(mean + module.variance_epsilon)


def _grpo_advantages(batch: Sequence[Group], *, std: bool) -> list[np.ndarray]:
    out = []
    for _, rewards in batch:
        values = rewards.astype(np.float64)
        advantages = values - values.mean()
        if std and advantages.any():
            advantages /= values.std(ddof=1) + 1e-6
        out.append(advantages)
    return out


def _step_advantages(batch: Sequence[Group]) -> list[np.ndarray]:
    """REINFORCE++: rewards, normalised over the tokens of the step."""
    lengths = [[len(t.tokens) for t in group] for group, _ in batch]
    tokens = np.concatenate([np.repeat(r, n) for (_, r), n in zip(batch, lengths, strict=True)])
    tokens = tokens.astype(np.float64)
    return [(r - tokens.mean()) / tokens.std() for _, r in batch]


def _reference(
    path: str,
    batch: Sequence[Group],
    all_advantages: Sequence[np.ndarray],
    *,
    by_token: bool,
    temperature: float,
) -> dict[str, torch.Tensor]:
    """One loss over the whole batch, sequence by sequence, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # transformers' own falls back to float32, and 1e-10 is asked for here.
            module.forward = functools.partial(_norm, module)
    loss = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(t.tokens) for group, _ in batch for t in group)
    samples = sum(len(group) for group, _ in batch)
    for (group, _), advantages in zip(batch, all_advantages, strict=True):
        for trajectory, advantage in zip(group, advantages, strict=True):
            ids = np.concatenate([trajectory.prompt_tokens, trajectory.tokens])
            logits = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
            logits = logits[len(trajectory.prompt_tokens) - 1 : -1] / temperature
            targets = torch.tensor(trajectory.tokens).long()
            logp = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
            weight = (logp.detach() - torch.tensor(trajectory.behaviour_logprobs)).exp()
            per_token = -weight.clamp(max=2.0) * advantage * logp
            loss = loss + (per_token.sum() / tokens if by_token else per_token.mean() / samples)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 511, 512, 40_959, 100_000])
def test_a_rounded_length_keeps_eight_bits(length: int) -> None:
    rounded = rounded_length(length)
    assert length * (1 - 1 / 128) < rounded <= length
    assert length >= 256 or rounded == length
    assert len({rounded_length(one) for one in range(length)}) <= 128 * 17


@pytest.mark.parametrize(
    ("name", "by_token", "std"), [("qwen3", True, True), ("llama", False, False)]
)
def test_gradient_is_exact_in_any_order_and_cut(
    name: str, by_token: bool, std: bool, model_path: ModelPath, group_of: GroupOf
) -> None:
    path = model_path(name)
    batch = _batch(group_of)
    settings = {
        "loss_normalization": "token" if by_token else "sequence",
        "advantage_normalization": "std" if std else "none",
    }
    advantages = _grpo_advantages(batch, std=std)
    want = _reference(path, batch, advantages, by_token=by_token, temperature=0.8)
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    rng = np.random.default_rng(1)
    for micro_batch_tokens, skip in ((8192, True), (1, False), (40, True), (23, False)):
        learner = _learner(
            path,
            temperature=0.8,
            micro_batch_tokens=micro_batch_tokens,
            skip_zero_variance_groups=skip,
            **settings,
        )
        order = rng.permutation(len(batch))
        _close(_gradient(learner, [batch[i] for i in order]), want)


def test_a_gradient_that_needs_the_whole_step_is_streamed_too(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    path = model_path("qwen3")
    batch = _batch(group_of)
    want = _reference(path, batch, _step_advantages(batch), by_token=True, temperature=1.0)
    learner = _learner(path, algorithm="reinforce_plus_plus", micro_batch_tokens=23)
    learner.add_group(*batch[0])
    learner.discard()  # and the parts of the loss with it
    _close(_gradient(learner, batch[::-1]), want)


def test_fused_layers_give_further_parts_of_a_loss(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    path, batch = model_path("qwen3"), _batch(group_of, groups=2)
    settings = {"algorithm": "reinforce_plus_plus", "dtype": "float32"}
    fused, plain = (_learner(path, fused=one, **settings) for one in (True, False))
    assert fused.policy.is_fused
    want = _gradient(plain, batch)
    for name, got in _gradient(fused, batch).items():
        torch.testing.assert_close(got, want[name], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_groups_that_share_forward_passes_give_the_same_gradient_and_rows(
    model_path: ModelPath, group_of: GroupOf, fused: bool
) -> None:
    """Micro-batches of several prompts, some of a whole group and some of a part of one."""
    path, batch = model_path("qwen3"), _batch(group_of)
    settings = {"dtype": "float32" if fused else "float64", "fused": fused}
    exact = 1e-5 if fused else 1e-10
    alone, mixed = (_learner(path, micro_batch_tokens=tokens, **settings) for tokens in (8192, 75))
    rows = [alone.add_group(*one) for one in batch]
    want = _gradient(alone, [])
    for first, last in ((0, 3), (3, 5)):
        found = mixed.add_groups(batch[first:last])
        for got, one in zip(found, rows[first:last], strict=True):
            torch.testing.assert_close(got, one, atol=exact, rtol=exact)
    assert float(rows[0].abs().sum()) > 0
    for name, got in _gradient(mixed, []).items():
        torch.testing.assert_close(got, want[name], atol=exact, rtol=10 * exact)
    both = group_of(7, np.random.default_rng(0)), np.arange(4, dtype=np.float32)
    with pytest.raises(BatchError, match="group 7 was already added"):
        mixed.add_groups([both, both])


def test_a_groups_own_order_does_not_matter(model_path: ModelPath, group_of: GroupOf) -> None:
    path = model_path("qwen3")
    batch = _batch(group_of)
    turned = [([*g[1:], g[0]], np.roll(r, -1)) for g, r in batch]
    _close(_gradient(_learner(path), turned), _gradient(_learner(path), batch))


def test_kl_penalty_pulls_back_to_the_initial_model(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    path = model_path("qwen3")
    batch = _batch(group_of)
    plain, pulled = _learner(path), _learner(path, kl_coefficient=0.5)
    # At the start both models are one: the penalty and its gradient are 0.
    _close(_gradient(pulled, batch), _gradient(plain, batch))
    plain.discard()
    pulled.discard()
    for learner in (plain, pulled):
        for trajectories, rewards in batch:
            learner.add_group(trajectories, rewards)
        first = learner.step().algorithm
        assert first.get("reference_kl", 0.0) == pytest.approx(0.0, abs=1e-12)
    again = _batch(group_of, seed=5)
    before = _gradient(pulled, again)
    without = _gradient(plain, again)
    assert max(float((before[n] - without[n]).abs().max()) for n in before) > 1e-6
    metrics = pulled.step()
    policy_loss, kl = metrics.algorithm["policy_loss"], metrics.algorithm["reference_kl"]
    assert policy_loss is not None
    assert kl is not None
    assert kl > 0
    assert metrics.learning.loss == pytest.approx(policy_loss + 0.5 * kl)


def test_step_applies_the_exact_denominator_and_clips(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    path = model_path("llama")
    batch = _batch(group_of)
    gradient = _gradient(_learner(path), batch)
    norm = float(torch.stack([g.norm() for g in gradient.values()]).norm())
    for bound in (10 * norm, norm / 4):
        learner = _learner(path, max_grad_norm=bound, weight_decay=0.1)
        for trajectories, rewards in batch:
            learner.add_group(trajectories, rewards)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name] * min(1.0, bound / norm)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=1e-3,
        ).step()
        metrics = learner.step()
        assert metrics.learning.grad_norm == pytest.approx(norm, rel=1e-9)
        for name, parameter in model.named_parameters():
            got = dict(learner.tensors())[name]
            torch.testing.assert_close(got, parameter.detach(), atol=1e-9, rtol=0)


def test_metrics_of_a_step(model_path: ModelPath, group_of: GroupOf) -> None:
    learner = _learner(model_path("qwen3"), dtype="float32")
    learner.step()
    learner.step()
    fresh, stale = _batch(group_of, version=2)[0], _batch(group_of, version=1)[2]
    silent = _batch(group_of, version=2)[1]
    for trajectories, rewards in (fresh, silent, stale):
        learner.add_group(trajectories, rewards)
    metrics = learner.step()
    everything = [t for group, _ in (fresh, silent, stale) for t in group]
    tokens = sum(len(t.tokens) for t in everything)
    rewards = np.concatenate([fresh[1], silent[1], stale[1]])
    assert metrics.batch.groups == 3
    assert metrics.batch.zero_variance_groups == 1
    assert metrics.batch.tokens == tokens
    assert metrics.batch.tokens_computed == tokens - sum(len(t.tokens) for t in silent[0])
    assert metrics.learning.reward_mean == pytest.approx(float(rewards.mean()), rel=1e-6)
    assert metrics.batch.response_length_mean == pytest.approx(tokens / 12)
    lengths = metrics.batch.response_lengths
    assert sum(lengths.values()) == 12
    assert sum(length * samples for length, samples in lengths.items()) == tokens
    assert metrics.staleness.mean == pytest.approx(sum(len(t.tokens) for t in stale[0]) / tokens)
    assert metrics.staleness.max == 1
    measured = metrics.mismatch
    assert None not in msgspec.structs.astuple(measured)
    assert measured.abs_mean > 0
    assert 0 < measured.fresh_abs_mean < measured.abs_max
    assert 0 < metrics.learning.entropy <= np.log(32)
    assert measured.ratio_max > measured.ratio_mean > 0
    assert metrics.algorithm.keys() == SIGNALS
    assert 0 < metrics.algorithm["effective_share"] < 1
    assert metrics.algorithm["chi_squared"] > 0
    assert learner.policy_version == 3


def test_on_policy_data_has_ratio_one(model_path: ModelPath, group_of: GroupOf) -> None:
    path = model_path("qwen3")
    model = AutoModelForCausalLM.from_pretrained(path).eval()

    def exact(prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        return logp.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()

    learner = _learner(path, dtype="float32")
    group = group_of(0, np.random.default_rng(0), logprobs=exact)
    learner.add_group(group, np.arange(4, dtype=np.float32))
    metrics = learner.step()
    assert metrics.mismatch.abs_max < 1e-5
    assert metrics.mismatch.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert metrics.mismatch.fresh_kl == pytest.approx(0.0, abs=1e-9)
    nothing_to_correct = {"effective_share": 1.0, "chi_squared": 0.0, "correction_masked": 0.0}
    for name, value in nothing_to_correct.items():
        assert metrics.algorithm[name] == pytest.approx(value, abs=1e-5)


def test_steps_raise_the_likelihood_of_rewarded_tokens(
    model_path: ModelPath, group_of: GroupOf
) -> None:
    learner = _learner(model_path("llama"), dtype="float32", learning_rate=3e-3)
    for _ in range(6):
        group = group_of(0, np.random.default_rng(0))
        learner.add_group(group, np.array([1, 0, 0, 0], np.float32))
        learner.step()
    best = group_of(0, np.random.default_rng(0))[0]
    ids = torch.from_numpy(np.concatenate([best.prompt_tokens, best.tokens])).long()
    start = len(best.prompt_tokens)
    chances = []
    for state in (None, learner.policy.model.state_dict()):
        model = AutoModelForCausalLM.from_pretrained(model_path("llama")).eval()
        if state is not None:
            model.load_state_dict(state)
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, start - 1 : -1], -1)
        chances.append(float(logp.gather(-1, ids[start:, None]).sum()))
    assert chances[1] > chances[0] + 0.1


def test_empty_and_silent_steps(model_path: ModelPath, group_of: GroupOf) -> None:
    learner = _learner(model_path("qwen3"), dtype="float32", weight_decay=0.1)
    before = {n: t.clone() for n, t in learner.tensors()}
    metrics = learner.step()
    assert (metrics.batch.groups, metrics.learning.grad_norm, learner.policy_version) == (0, 0, 1)
    assert all(torch.equal(t, before[n]) for n, t in learner.tensors())
    learner.add_group(group_of(0, np.random.default_rng(0)), np.ones(4, np.float32))
    metrics = learner.step()
    assert (metrics.batch.groups, metrics.batch.tokens_computed) == (1, 0)
    assert metrics.learning.grad_norm == 0
    assert metrics.learning.entropy is None, "no token was computed"
    assert metrics.algorithm == dict.fromkeys(SIGNALS)
    # An ordinary step with gradient 0: weight decay acts.
    name = "model.embed_tokens.weight"
    assert not torch.equal(dict(learner.tensors())[name], before[name])


def test_tied_weights_are_given_once(model_path: ModelPath) -> None:
    tied = [name for name, _ in _learner(model_path("qwen3")).tensors()]
    assert "model.embed_tokens.weight" in tied
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in [name for name, _ in _learner(model_path("llama")).tensors()]


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("gpg", "k3"), ("reinforce_plus_plus", "k1"), ("reinforce_plus_plus", "k2"), ("ppo", "k3")],
)
def test_a_loss_that_the_step_scales_is_reported_with_and_without_its_penalty(
    name: str, estimator: str, model_path: ModelPath, group_of: GroupOf
) -> None:
    learner = _learner(
        model_path("qwen3"), algorithm=name, kl_coefficient=0.5, kl_estimator=estimator
    )
    for seed in range(2):  # in the first step the policy is its reference
        for trajectories, rewards in _batch(group_of, seed=seed):
            learner.add_group(trajectories, rewards)
        metrics = learner.step()
    policy_loss, kl = metrics.algorithm["policy_loss"], metrics.algorithm["reference_kl"]
    assert policy_loss is not None
    assert kl is not None
    penalty = 0.5 * kl if estimator != "k1" else 0.0  # k1 is part of the advantages
    assert abs(kl) > 1e-6
    assert metrics.learning.loss == pytest.approx(policy_loss + penalty, rel=1e-9)


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_rewards_of_zero_are_no_lack_of_signal_where_nothing_compares_a_group(
    name: str, model_path: ModelPath, group_of: GroupOf
) -> None:
    learner = _learner(model_path("qwen3"), algorithm=name)
    for index, (trajectories, rewards) in enumerate(_batch(group_of)):
        learner.add_group(trajectories, rewards * (index != 0))  # group 1 has rewards of 1
    silent = learner.step().batch.zero_variance_groups
    assert silent == (2 if name == "reinforce_plus_plus_baseline" else 0)


@pytest.mark.parametrize("shift", [100.0, 1000.0])
@pytest.mark.parametrize(
    "name",
    [
        *("grpo", "dr_grpo", "dapo", "rloo", "reinforce", "gspo", "cispo", "gpg", "ppo"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    ],
)
def test_in_bfloat16_a_constant_added_to_all_rewards_changes_nothing(
    name: str, shift: float, model_path: ModelPath, group_of: GroupOf
) -> None:
    """From the second step on: the first one shows where the rewards lie."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "learning_rate": 1e-12, "algorithm": name}
    if name == "ppo":
        settings["critic"] = {"gae_lambda": 1.0}
    found = []
    for added in (0.0, shift):
        learner = _learner(model_path("qwen3"), **settings)
        for step in range(2):
            batch = _batch(group_of, seed=step, version=step)
            moved = [(group, rewards + np.float32(added)) for group, rewards in batch]
            if not step:
                for trajectories, rewards in moved:
                    learner.add_group(trajectories, rewards)
                learner.step()
        gradient = _gradient(learner, moved)
        found.append(torch.cat([one.double().flatten() for one in gradient.values()]))
    assert torch.cosine_similarity(*found, dim=0) > 0.98


def test_the_centre_of_the_advantages_is_part_of_a_checkpoint(
    tmp_path: Path, model_path: ModelPath, group_of: GroupOf
) -> None:
    learner = _learner(model_path("qwen3"), algorithm="reinforce_plus_plus")
    for trajectories, rewards in _batch(group_of):
        learner.add_group(trajectories, rewards + np.float32(7))
    learner.step()
    assert 5 < learner._stepping.centre < 9
    learner.save(tmp_path / "step-1")
    other = _learner(model_path("qwen3"), algorithm="reinforce_plus_plus")
    other.restore(tmp_path / "step-1")
    assert other._stepping.centre == learner._stepping.centre
