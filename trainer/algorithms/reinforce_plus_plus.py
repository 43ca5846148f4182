"""REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole step.

With reward r of a token's sample, and mean and standard deviation over all tokens of the step:

    a = r                      reinforce_plus_plus (a group may have one sample)
    a = r - mean of the group  reinforce_plus_plus_baseline
    A = (a - mean(a)) / std(a)
    loss = -w * A * log p      w = correction of p / b

With `kl_estimator: k1` the penalty is part of a: the paper's r - beta * sum of k1 to come.

**Streaming.** Mean and standard deviation are known when the step's last group has arrived. Since
the loss is linear in A, its gradient is

    1 / std(a) * (gradient of -w a log p  -  mean(a) * gradient of -w log p)

so the learner keeps two gradient sums and nothing waits, at the cost of a second backward pass and
the memory of one more gradient. In bfloat16 the two would cancel where mean(a) is far from 0
(rewards of 1,000 +- 1 would leave nothing of the gradient). So both a and mean(a) are relative to
`centre`, the last step's mean (0 in a run's first step), which changes rounding only.

PPO's clip is not linear in A, so there is none: in a single pass it clips nothing on-policy. The
standard deviation is the population's; if it is 0, the step has no gradient. Empty batch: loss 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from asyncrl.trainer.algorithms.base import (
    STD_EPSILON,
    Finish,
    LossSums,
    Rewards,
    Signal,
    StepSums,
    TokenBatch,
    centred,
)
from asyncrl.trainer.algorithms.losses import score_function
from asyncrl.trainer.base.config import TrainerConfig

UNIT = "unit"
"""The part of the loss in which every advantage is 1."""

MOMENTS = {
    "advantage_mean": Signal("advantage before it is normalised over the step, mean"),
    "advantage_square": Signal("advantage before it is normalised over the step, mean square"),
}


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """Rewards, normalised over the tokens of the step."""

    needs_reference: ClassVar[bool] = False
    needs_every_group: ClassVar[bool] = True

    gathered: bool = False
    """True if the learner has already normalised the advantages (several passes)."""

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """Create it from the trainer's settings."""
        return cls(gathered=config.gathers_first)

    @property
    def signals(self) -> Mapping[str, Signal]:
        """Moments of the advantages, if this class normalises them."""
        return {} if self.gathered else MOMENTS

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` unchanged rewards."""
        return np.asarray(rewards, np.float64)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Loss with a as advantage, and its part with 1 as advantage."""
        if self.gathered:
            return LossSums(score_function(batch, batch.advantages))
        loss = score_function(batch, batch.advantages - batch.centre)
        ones = score_function(batch, batch.advantages.new_ones(()))
        return LossSums(loss, moments(batch), {UNIT: ones})

    def finish(self, step: StepSums) -> Finish:
        """Factors 1 / std(a) and (centre - mean(a)) / std(a)."""
        return Finish() if self.gathered else normalising_factors(step)


def mean_of(totals: Mapping[str, list[float]], tokens: int) -> float | None:
    """Mean of a step's advantages from its signal sums, if it has one."""
    total = totals.get("advantage_mean")
    return total[0] / tokens if total and tokens else None


def moments(batch: TokenBatch) -> dict[str, Tensor]:
    """Return the sums of `MOMENTS`."""
    raw = batch.advantages.double()
    return {"advantage_mean": raw.sum(), "advantage_square": raw.square().sum()}


def normalising_factors(step: StepSums) -> Finish:
    """Factors of the loss and its part `UNIT` that normalise the advantages over a step."""
    mean = step.sums.get("advantage_mean", 0.0) / max(step.tokens, 1)
    square = step.sums.get("advantage_square", 0.0) / max(step.tokens, 1)
    std = math.sqrt(max(square - mean**2, 0.0))
    if std <= STD_EPSILON * max(1.0, abs(mean)):
        return Finish(scale=0.0, parts={UNIT: 0.0})
    return Finish(scale=1 / std, parts={UNIT: (step.centre - mean) / std})


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """Rewards minus their group's mean, normalised over the tokens of the step."""

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` rewards minus their mean. Raises ValueError if G < 2."""
        return centred(rewards)
