"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): weights are clipped, no token is dropped.

    A    = (r - mean(r)) / (std(r) + 1e-6)             advantage_normalization: std
    w    = sg(clip(p / b, 1 - low, 1 + high))
    loss = -w * A * log p                              over the step's tokens

PPO drops the gradient of a token whose ratio is clipped; here it keeps its gradient, with the
clipped weight. The paper sets no lower bound: `clip_ratio_low` is 1 by default, so only 1 +
`clip_ratio_high` = 5 bounds the weight (ScaleRL, arXiv 2510.13786: 4 to 8 alike). Empty batch: 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from asyncrl.trainer.algorithms.base import (
    LossSums,
    Rewards,
    Signal,
    TokenBatch,
    centred,
    per_group_std,
)
from asyncrl.trainer.algorithms.losses import kept, weighted_logprobs
from asyncrl.trainer.base.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Cispo:
    """Group-relative advantages and the score function with clipped importance weights."""

    signals: ClassVar[Mapping[str, Signal]] = {
        "weight_clipped": Signal(
            "share of tokens whose importance weight was clipped; they keep their gradient"
        )
    }
    needs_reference: ClassVar[bool] = False

    normalize_std: bool
    clip_ratio_low: float
    clip_ratio_high: float

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """Create it from the trainer's settings."""
        return cls(
            normalize_std=config.advantage_normalization == "std",
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
        )

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` group-relative advantages. Raises ValueError if G < 2."""
        return per_group_std(rewards) if self.normalize_std else centred(rewards)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equations."""
        ratio = torch.exp(batch.logprobs.detach() - batch.behaviour_logprobs)
        inside = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        weight = inside if batch.kept is None else inside * batch.kept
        return LossSums(
            loss=weighted_logprobs(batch, weight),
            sums={"weight_clipped": ((inside != ratio) & kept(batch)).sum()},
        )
