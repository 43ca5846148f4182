"""The optimizer steps of one step of a run, computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.step_audit.formulas import (
    AdamW,
    Tensors,
    Tokens,
    gae,
    group_advantages,
    judged,
    kl,
    learning_rate,
    overlong,
)
from benchmarks.step_audit.model import Folder, Model, PolicyWeights, Sample


@dataclass(slots=True)
class StepTargets:
    """Of one sample of N drawn tokens; tensors are `[N]` and have no gradients."""

    sample: Sample
    behaviour: Tensor
    """Log-probabilities under the versions that drew the tokens."""
    proximal: Tensor
    """Log-probabilities under the policy of the step's start."""
    entropy: Tensor
    outside: Tensor
    advantages: Tensor
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


class Start:
    """Attributes: `groups`, by number; `silent`, groups without signal; `raw`, advantages."""

    @torch.no_grad()
    def __init__(
        self, folder: Folder, model: Model, weights: PolicyWeights, step: int, critic: AdamW | None
    ) -> None:
        self._config, self._model = folder.config, model
        self._trainer = c = folder.config["trainer"]
        groups = folder.samples[step]
        samples = [one for group in groups.values() for one in group]
        now = model.scores(weights.of_engines(step), samples)
        reference: Sequence[Tensor | None] = [None] * len(samples)
        if c["kl_coefficient"]:
            scores = model.scores(weights.reference(step), samples)
            reference = [one.logprobs for one in scores]
        made = [
            StepTargets(
                sample, own, one.logprobs, one.entropy, one.outside, one.logprobs * 0, other
            )
            for sample, own, one, other in zip(
                samples, self._behaviour(weights, samples), now, reference, strict=True
            )
        ]
        of_sample = dict(zip(map(id, samples), made, strict=True))
        self.groups = {n: [of_sample[id(one)] for one in group] for n, group in groups.items()}
        self.silent: set[int] = set()
        for number in self.groups:
            self._compare(number)
        if critic is not None:
            self._estimate(made, critic)
        self.raw: Tensor | None = None
        """`[N]` of all tokens, where they are normalised over the step."""
        if c["algorithm"].startswith("reinforce_plus_plus") or (
            critic is not None and c["advantage_normalization"] == "std"
        ):
            self.raw = torch.cat([one.advantages for one in made])
            std = self.raw.std(correction=0)
            for one in made:
                one.advantages = (one.advantages - self.raw.mean()) / (std if std > 1e-6 else 1e99)

    def computed(self, numbers: Sequence[int]) -> list[StepTargets]:
        """Samples that go through the model: of groups with signal, or all."""
        c = self._trainer
        every = c["algorithm"] in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        if every or c["kl_coefficient"] or not c["skip_zero_variance_groups"]:
            return [one for number in numbers for one in self.groups[number]]
        return [one for n in numbers if n not in self.silent for one in self.groups[n]]

    def _behaviour(self, weights: PolicyWeights, samples: Sequence[Sample]) -> list[Tensor]:
        out = [torch.full((len(one),), torch.nan, dtype=torch.float64) for one in samples]
        for version in sorted({int(v) for one in samples for v in one.versions}):
            scores = self._model.scores(weights.of_engines(version), samples)
            for sample, into, found in zip(samples, out, scores, strict=True):
                chosen = torch.from_numpy(sample.versions == version)
                into[chosen] = found.logprobs[chosen]
        return out

    def _compare(self, number: int) -> None:
        """Give a group's samples their advantages; with a critic, their rewards."""
        c, longest = self._trainer, self._config["sampling"]["max_tokens"]
        group = self.groups[number]
        rewards = [o.sample.record.reward + overlong(c, o.sample.longest, longest) for o in group]
        advantages = group_advantages(c, np.array(rewards))
        if c["algorithm"] not in ("ppo", "reinforce_plus_plus") and not advantages.any():
            self.silent.add(number)
        for one, advantage in zip(group, advantages.tolist(), strict=True):
            one.advantages = one.advantages + advantage
            if self._penalises(one) and c["algorithm"] != "ppo":
                to_go = self._penalty(one).flip(0).cumsum(0).flip(0)
                one.advantages = one.advantages - to_go

    def _estimate(self, made: Sequence[StepTargets], critic: AdamW) -> None:
        """With a critic, rewards become advantages and returns."""
        c = self._trainer["critic"]
        values, ends = self._model.values(critic.weights, [one.sample for one in made])
        for one, value, end in zip(made, values, ends, strict=True):
            rewards = -self._penalty(one) if self._penalises(one) else torch.zeros_like(value)
            rewards[-1] += one.advantages[0]
            after = float(end) if c["truncated"] == "bootstrap" and one.sample.is_cut else 0.0
            found = gae(rewards.tolist(), value.tolist(), after, c["gamma"], c["gae_lambda"])
            one.advantages = torch.tensor(found, dtype=torch.float64)
            one.values, one.returns = value, one.advantages + value

    def _penalises(self, one: StepTargets) -> bool:
        """Whether the KL is part of the reward."""
        return one.reference is not None and self._trainer["kl_estimator"] == "k1"

    def _penalty(self, one: StepTargets) -> Tensor:
        assert one.reference is not None
        coefficient = float(self._trainer["kl_coefficient"])
        return coefficient * kl(self._trainer, one.proximal, one.reference)


@dataclass(slots=True)
class Sums:
    """Over the optimizer steps of a step."""

    losses: float = 0.0
    sizes: float = 0.0
    """Denominators of the losses."""
    computed: int = 0
    """Tokens that went through the model."""
    norms: list[float] = field(default_factory=list)
    """Of the policy's gradients before clipping."""
    by_token: dict[str, float] = field(default_factory=dict)
    """Signals that are means over computed tokens."""
    by_size: dict[str, float] = field(default_factory=dict)
    """Signals that are divided as the loss is."""


class Step:
    """Attributes: `policy`, `critic` (None without one), `start`, `sums`; `take` changes them."""

    def __init__(self, folder: Folder, model: Model, step: int) -> None:
        self._model, self._step, self._steps = model, step, folder.config["run"]["steps"]
        self._trainer = folder.config["trainer"]
        self._weights = PolicyWeights(folder)
        self.policy = self._weights.policy(step)
        has_critic = self._trainer["algorithm"] == "ppo"
        self.critic = self._weights.critic(step) if has_critic else None
        self.start = Start(folder, model, self._weights, step, self.critic)
        self.sums = Sums()

    def take(self) -> None:
        c = self._trainer
        for _ in range(c["ppo_epochs"]):
            for share in self._shares(c["minibatches"]):
                self._update(share)
        if self.critic is not None:
            for _ in range(1, c["critic"]["passes"]):
                for share in self._shares(c["critic"]["minibatches"]):
                    self._fit_critic(self.start.computed(share), None)

    def _shares(self, count: int) -> list[list[int]]:
        """Groups in data order, in equal shares."""
        order = sorted(self.start.groups)
        return [one.tolist() for one in np.array_split(order, min(count, len(order)))]

    def _size(self, samples: Sequence[StepTargets]) -> float:
        by_token = self._trainer["loss_normalization"] == "token"
        return float(sum(len(one.sample) for one in samples) if by_token else len(samples))

    def _weight(self, one: StepTargets) -> float:
        if self._trainer["mask_truncated_completions"] and one.sample.is_cut:
            return 0.0
        return 1 / len(one.sample) if self._trainer["loss_normalization"] == "sequence" else 1.0

    def _update(self, numbers: Sequence[int]) -> None:
        """One optimizer step of the policy, and of the critic."""
        c, sums = self._trainer, self.sums
        size = self._size([one for number in numbers for one in self.start.groups[number]])
        chosen, total = self.start.computed(numbers), torch.zeros((), dtype=torch.float64)
        leaves = {k: v.clone().requires_grad_() for k, v in self.policy.weights.items()}
        with_signal = len(set(numbers) - self.start.silent)
        alpha = len(numbers) / max(with_signal, 1) if c["algorithm"] == "gpg" else 1.0
        samples = [one.sample for one in chosen]
        scores = self._model.scores(self._weights.whole(leaves), samples) if chosen else []
        for one, now in zip(chosen, scores, strict=True):
            total = total + self._loss(one, now.logprobs, alpha)
        gradients = _gradients(total / size, leaves)
        sums.losses, sums.sizes = sums.losses + float(total.detach()), sums.sizes + size
        norm, rate = 0.0, learning_rate(c, self._step, self._steps)
        if self._step >= c["critic"]["head_start_steps"]:
            norm = self.policy.step(gradients, rate)
        sums.norms.append(norm)
        if self.critic is not None:
            self._fit_critic(chosen, sums)

    def _loss(self, one: StepTargets, current: Tensor, alpha: float) -> Tensor:
        """Sum over a sample's tokens; its signals are added up."""
        c, sums, weight = self._trainer, self.sums, self._weight(one)
        uses = c["algorithm"] in ("grpo", "dr_grpo", "dapo", "ppo")
        proximal = one.proximal if uses and c["proximal_policy"] == "current" else None
        found = judged(c, Tokens(current, one.behaviour, one.advantages, proximal))
        losses = alpha * found.losses
        if one.reference is not None:
            estimate = kl(c, current, one.reference)
            _add(sums.by_size, "policy_loss", weight * losses)
            _add(sums.by_token, "reference_kl", estimate)
            if c["kl_estimator"] != "k1":
                losses = losses + c["kl_coefficient"] * estimate
        for name, values in found.signals.items():
            _add(sums.by_token, name, values)
        _add(sums.by_token, "correction_masked", 1 - found.kept)
        _add(sums.by_token, "chi_squared", found.ratio**2 - 1)
        _add(sums.by_token, "weights", found.weight)
        _add(sums.by_token, "squares", found.weight**2)
        sums.computed += len(one.sample)
        return weight * losses.sum()

    def _fit_critic(self, chosen: Sequence[StepTargets], sums: Sums | None) -> None:
        """One optimizer step of the critic; `sums` gets its signals."""
        assert self.critic is not None
        c, size = self._trainer["critic"], self._size(chosen)
        clip = c["value_clip"] or torch.inf
        leaves = {k: v.clone().requires_grad_() for k, v in self.critic.weights.items()}
        values, _ = self._model.values(leaves, [one.sample for one in chosen])
        total = torch.zeros((), dtype=torch.float64)
        for one, value in zip(chosen, values, strict=True):
            assert one.values is not None
            assert one.returns is not None
            moved = value - one.values
            plain = (value - one.returns) ** 2
            clipped = (one.values + moved.clamp(-clip, clip) - one.returns) ** 2
            total = total + self._weight(one) * torch.maximum(plain, clipped).sum() / 2
            if sums is not None:
                beyond = (clipped > plain) & (moved.abs() > clip)
                _add(sums.by_token, "value_clipped", beyond)
        if sums is not None:
            _add(sums.by_size, "value_loss", total)
        gradients = _gradients(c["value_coefficient"] * total / size, leaves)
        rise = min(1.0, (self._step + 1) / (c["warmup_steps"] + 1))
        self.critic.step(gradients, c["learning_rate"] * rise)


def _add(where: dict[str, float], name: str, values: Tensor) -> None:
    where[name] = where.get(name, 0.0) + float(values.detach().sum())


def _gradients(loss: Tensor, leaves: Tensors) -> Tensors:
    if not loss.requires_grad:
        return {name: torch.zeros_like(one) for name, one in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
