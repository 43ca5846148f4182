"""Decides whether a group carries signal, and estimates how many groups do. Pure.

A group carries signal if its rewards are not all equal. If they are, every advantage that compares
a sample with the others of its group is 0. Rewards are compared as the trainer gets them, in
float32, before any penalty of the trainer's (`trainer.overlong_buffer`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

UNIT = 1024
"""Weight of a group that certainly carries signal; others weigh in proportion to their
probability."""
_MEMORY = 0.75
"""Decay of the share with signal per step: it changes as the policy learns."""


class Verdict(Enum):
    """Knowledge of a group's signal, only from data that its step may train on."""

    OPEN = "open"
    """Not all of its samples are finished, new enough and rewarded."""
    SIGNAL = "signal"
    NO_SIGNAL = "no signal"


@dataclass(slots=True, eq=False)
class GroupSignal:
    """The scheduler's knowledge of a group's samples beyond their states."""

    rewards: list[float | None]
    """`[group_size]` rewards of the contents reported last; None if not computed yet."""
    oldest: list[int]
    """`[group_size]` lower bound of the tokens' versions of each sample."""
    verdict: Verdict = Verdict.OPEN

    @classmethod
    def new(cls, size: int) -> GroupSignal:
        """Create it for a group with no sample started."""
        return cls([None] * size, [-1] * size)

    def forget(self, sample: int, oldest: int = -1) -> None:
        """Forget the reward and verdict of a sample with other contents, or none.

        `oldest` is the new lower bound of its tokens' versions.
        """
        self.rewards[sample], self.oldest[sample] = None, oldest
        self.verdict = Verdict.OPEN


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group are not all equal.

    >>> has_signal([0.0, 1.0]), has_signal([1.0, 1.0]), has_signal([0.1, 0.1 + 1e-12])
    (True, False, False)
    """
    return len(set(array("f", rewards))) > 1


class SignalShare:
    """Estimates which share of the groups carries signal, from those that steps have looked at.

    A mean over the last steps, with a prior of one step's worth of groups with signal. It decides
    how many groups are issued, and so when, and nothing else. `max_batches` are the groups that a
    step may look at, in multiples of `groups_per_step`.

    >>> share = SignalShare(groups_per_step=4, max_batches=8)
    >>> share.weight == UNIT
    True
    >>> share.step(with_signal=4, without=12)
    >>> round(share.weight / UNIT, 2)  # (3 + 4) of (3 + 16)
    0.37
    """

    def __init__(self, *, groups_per_step: int, max_batches: int) -> None:
        self._with = float(groups_per_step)
        self._all = float(groups_per_step)
        self._least = max(1, UNIT // max_batches)

    def step(self, *, with_signal: int, without: int) -> None:
        """Note the groups that a step has looked at."""
        self._with = _MEMORY * self._with + with_signal
        self._all = _MEMORY * self._all + with_signal + without

    @property
    def weight(self) -> int:
        """Expected share with signal of unknown groups, in units of 1 / `UNIT`."""
        return min(UNIT, max(self._least, round(UNIT * self._with / max(1.0, self._all))))
