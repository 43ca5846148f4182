"""What is known when a step begins: who drew each token with what probability, and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.step_audit.adamw import AdamW
from benchmarks.step_audit.folder import Folder, Sample
from benchmarks.step_audit.formulas import gae, group_advantages, kl, overlong
from benchmarks.step_audit.model import Model
from benchmarks.step_audit.weights import Weights


@dataclass(slots=True)
class Fixed:
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
        self, folder: Folder, model: Model, weights: Weights, step: int, critic: AdamW | None
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
            Fixed(sample, own, one.logprobs, one.entropy, one.outside, one.logprobs * 0, other)
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

    def computed(self, numbers: Sequence[int]) -> list[Fixed]:
        """Samples that go through the model: of groups with signal, or all."""
        c = self._trainer
        every = c["algorithm"] in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        if every or c["kl_coefficient"] or not c["skip_zero_variance_groups"]:
            return [one for number in numbers for one in self.groups[number]]
        return [one for n in numbers if n not in self.silent for one in self.groups[n]]

    def _behaviour(self, weights: Weights, samples: Sequence[Sample]) -> list[Tensor]:
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

    def _estimate(self, made: Sequence[Fixed], critic: AdamW) -> None:
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

    def _penalises(self, one: Fixed) -> bool:
        """Whether the KL is part of the reward."""
        return one.reference is not None and self._trainer["kl_estimator"] == "k1"

    def _penalty(self, one: Fixed) -> Tensor:
        assert one.reference is not None
        coefficient = float(self._trainer["kl_coefficient"])
        return coefficient * kl(self._trainer, one.proximal, one.reference)
