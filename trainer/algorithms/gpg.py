"""GPG, Group Policy Gradient (arXiv 2504.02546): no ratio, no reference, no critic.

    A_i  = r_i - mean(r)                 (the paper's F_norm = 1)
    loss = -alpha * A * log p,           alpha = groups / groups with signal, of the step

alpha compensates for groups whose rewards are all equal: they have no gradient but count in the
denominator. It is known when the step's last group has arrived, and scales the whole sum, so the
loss is streamed. The correction weights stale tokens. Empty batch: loss 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from asyncrl.trainer.algorithms.base import (
    Finish,
    LossSums,
    Rewards,
    Signal,
    StepSums,
    TokenBatch,
    centred,
)
from asyncrl.trainer.algorithms.losses import importance, weighted_logprobs
from asyncrl.trainer.base.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Gpg:
    """Centred rewards, the score function, and the step's factor."""

    signals: ClassVar[Mapping[str, Signal]] = {}
    needs_reference: ClassVar[bool] = False
    needs_every_group: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """Create it; it reads no settings."""
        del config
        return cls()

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` rewards minus their mean. Raises ValueError if G < 2."""
        return centred(rewards)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equation, without alpha."""
        return LossSums(weighted_logprobs(batch, importance(batch)))

    def finish(self, step: StepSums) -> Finish:
        """Return alpha; 0 if no group has signal."""
        with_signal = step.groups - step.groups_without_signal
        return Finish(scale=step.groups / with_signal if with_signal else 0.0)
