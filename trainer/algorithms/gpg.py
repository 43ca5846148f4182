"""GPG, Group Policy Gradient (arXiv 2504.02546): no ratio, no reference, no critic.

    A_i  = r_i - mean(r)                 (the paper's F_norm = 1)
    loss = -alpha * A * log p,           alpha = groups / groups with signal, of the step

alpha compensates for groups whose rewards are all equal: they have no gradient but count in the
denominator. It is known when the step's last group has arrived, and scales the whole sum, so the
loss is streamed. The correction weights stale tokens. Empty batch: loss 0.
"""

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.trainer.algorithms.base import Finish, Rewards, StepSums, centred
from asyncrl.trainer.algorithms.reinforce import Reinforce


@dataclass(frozen=True, slots=True)
class Gpg(Reinforce):
    """Centred rewards, the score function, and the step's factor."""

    needs_every_group: ClassVar[bool] = False

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` rewards minus their mean. Raises ValueError if G < 2."""
        return centred(rewards)

    def finish(self, step: StepSums) -> Finish:
        """Return alpha; 0 if no group has signal."""
        with_signal = step.groups - step.groups_without_signal
        return Finish(scale=step.groups / with_signal if with_signal else 0.0)
