"""GSPO, Group Sequence Policy Optimization (arXiv 2507.18071, eq. 5 and 7).

For a sample of L tokens with current and behaviour probabilities p and b:

    A    = (r - mean(r)) / (std(r) + 1e-6)             advantage_normalization: std
    s    = exp(1 / L * sum of log(p / b))              the sample's ratio, a geometric mean
    loss = -min(s A, clip(s, 1 - low, 1 + high) A)     once a sample; the gradient flows through s

A token's weight is 1 / L (`loss_normalization: sequence`), so a sample's tokens add up to this
loss. A sample's ratio moves far less than a token's: `clip_ratio_low` is 3e-4 and `clip_ratio_high`
4e-4 (section 5.1). On-policy s = 1 and the gradient is GRPO's with `sequence`. Empty batch: loss 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch, sample_means
from asyncrl.trainer.algorithms.grpo import Grpo
from asyncrl.trainer.algorithms.losses import Clip


@dataclass(frozen=True, slots=True)
class Gspo(Grpo):
    """Group-relative advantages and the clipped ratio of whole samples."""

    signals: ClassVar[Mapping[str, Signal]] = {"clip_ratio": Grpo.signals["clip_ratio"]}

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equations."""
        gap = batch.logprobs - batch.behaviour_logprobs
        ratio = torch.exp(sample_means(gap, batch.samples))
        sums = Clip(self.clip_ratio_low, self.clip_ratio_high).loss(batch, ratio)
        return LossSums(sums.loss, {"clip_ratio": sums.sums["clip_ratio"]})
