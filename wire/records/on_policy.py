"""Tells if the steps of a run trained on exactly on-policy samples.

A step records it (`LearnerMetrics.exactly_on_policy`); a run combines all its steps:

    >>> OnPolicySteps(yes=2).exactly
    True
    >>> OnPolicySteps(yes=2, no=1, unknown=1).exactly
    False
    >>> OnPolicySteps(yes=2, unknown=1).exactly is None
    True
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

from asyncrl.wire.records.step import LearnerMetrics


class OnPolicySteps(NamedTuple):
    """Numbers of steps that were exactly on-policy, were not, or are unknown."""

    yes: int = 0
    no: int = 0
    unknown: int = 0
    """Steps without a record, or with one of an earlier version of asyncrl."""

    @classmethod
    def of(cls, flags: Counter[bool | None], steps: int) -> Self:
        """Make the counts of a run of `steps` steps from its records' flags (`is_on_policy`)."""
        return cls(flags[True], flags[False], steps - flags[True] - flags[False])

    @property
    def exactly(self) -> bool | None:
        """True if all steps were. None: all known ones were, but some steps are unknown."""
        if self.no:
            return False
        return None if self.unknown else True


def is_on_policy(step: LearnerMetrics) -> bool | None:
    """Return True if a step trained on exactly on-policy samples; None if its record is silent."""
    return False if step.staleness.max else step.exactly_on_policy
