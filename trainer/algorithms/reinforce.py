"""REINFORCE with the leave-one-out baseline (RLOO, arXiv 2402.14740, section 2.2).

    A_i  = r_i - mean over j != i of r_j  =  (r_i - mean(r)) * G / (G - 1)
    loss = -sg(w) * A * log p,    w = min(p / b, cap)

The gradient is unbiased where no weight reaches the cap. `advantage_normalization`,
`proximal_policy` and `clip_ratio_*` have no effect. A group of one sample has no baseline and is
refused. Denominators: see `trainer.algorithms.base`. Empty batch: loss 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from trainer.algorithms.base import (
    LossSums,
    Rewards,
    Signal,
    TokenBatch,
    centred,
    importance_weights,
)
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Reinforce:
    """Leave-one-out advantages and the importance-weighted score function."""

    signals: ClassVar[Mapping[str, Signal]] = {
        "importance_capped": Signal("share of tokens that reached `trainer.importance_cap`"),
    }
    needs_reference: ClassVar[bool] = False

    importance_cap: float

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """Take what this algorithm needs from the trainer's settings."""
        return cls(importance_cap=config.importance_cap)

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` leave-one-out advantages. Raises ValueError: G < 2."""
        size = len(rewards)
        return centred(rewards) * (size / (size - 1))

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equation."""
        weight = importance_weights(batch.logprobs, batch.behaviour_logprobs, self.importance_cap)
        return LossSums(
            loss=-(batch.weights * weight * batch.advantages * batch.logprobs).sum(),
            sums={
                "importance_capped": ((weight >= self.importance_cap) & (batch.weights != 0)).sum()
            },
        )
