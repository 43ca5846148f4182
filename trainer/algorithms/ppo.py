"""PPO with a critic (arXiv 1707.06347), for tokens (InstructGPT, 2203.02155).

A[t] is the generalised advantage estimate of token t (`trainer.step_targets`) with the critic's
values at the step's start. With current probability p, behaviour probability b, and x the
probability under the policy of the step's start:

    A    = (A - mean) / std over the tokens of the step     advantage_normalization: std
    u    = p / x, w = correction of x / b                   proximal_policy: current (default)
    u    = p / b, w = 1, and dual_clip if it is set          proximal_policy: behaviour
    loss = -w min(u A, clip(u, 1 - low, 1 + high) A)        + the value loss (`trainer.critic`)

**Streaming.** Values and advantages of a group are computed when it arrives, since the critic does
not change within a step. With one pass x = p: u = 1, nothing is clipped, and the loss is linear in
A, so its normalisation is applied to two gradient sums when the step ends, as in
`reinforce_plus_plus`. With several passes, or with `proximal_policy: behaviour` and
`advantage_normalization: std`, the clip depends on the mean over the step: groups are scored as
they arrive, and their gradients wait for the last one. Empty batch: loss 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from asyncrl.trainer.algorithms.base import Finish, LossSums, Rewards, Signal, StepSums, TokenBatch
from asyncrl.trainer.algorithms.losses import Clipped, score_function
from asyncrl.trainer.algorithms.reinforce_plus_plus import (
    MOMENTS,
    UNIT,
    moments,
    normalising_factors,
)
from asyncrl.trainer.base.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Ppo(Clipped):
    """PPO's loss of the batch's advantages."""

    needs_critic: ClassVar[bool] = True
    needs_every_group: ClassVar[bool] = True

    @staticmethod
    def from_config(config: TrainerConfig) -> "Ppo":
        """Create it from the trainer's settings."""
        streams = config.normalises_over_step and not config.gathers_first
        return (PpoStreamed if streams else Ppo)(**Clipped.settings_of(config))

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` unchanged rewards; the critic's values are subtracted for each token."""
        return np.asarray(rewards, np.float64)


@dataclass(frozen=True, slots=True)
class PpoStreamed(Ppo):
    """PPO whose advantages are normalised over the step when it ends."""

    signals: ClassVar[Mapping[str, Signal]] = {**Ppo.signals, **MOMENTS}

    def loss(self, batch: TokenBatch) -> LossSums:
        """Loss with the raw advantage, and its part with 1 as advantage."""
        own = Ppo.loss(self, replace(batch, advantages=batch.advantages - batch.centre))
        ones = score_function(batch, batch.advantages.new_ones(()))
        return LossSums(own.loss, {**own.sums, **moments(batch)}, {UNIT: ones})

    def finish(self, step: StepSums) -> Finish:
        """Factors 1 / std(a) and (centre - mean(a)) / std(a)."""
        return normalising_factors(step)
