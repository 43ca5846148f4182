"""Whether the steps of a run trained on exactly on-policy samples.

A step knows it of itself (`LearnerMetrics.exactly_on_policy`), and a run is what all its steps are:

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
    """How many steps were exactly on-policy."""

    yes: int = 0
    no: int = 0
    unknown: int = 0
    """Steps without a record, or with one of an earlier version of asyncrl."""

    @classmethod
    def of(cls, flags: Counter[bool | None], steps: int) -> Self:
        """The counts of a run of this many steps, from those of its records (`is_on_policy`)."""
        return cls(flags[True], flags[False], steps - flags[True] - flags[False])

    @property
    def exactly(self) -> bool | None:
        """Whether all steps were. None: as far as is known, but some steps are unknown."""
        if self.no:
            return False
        return None if self.unknown else True


def is_on_policy(step: LearnerMetrics) -> bool | None:
    """Whether a step trained on exactly on-policy samples; None if its record does not say so."""
    return False if step.staleness.max else step.exactly_on_policy
