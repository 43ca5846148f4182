"""Which samples an evaluation has: the sets, their prompts, and the order of all samples.

>>> plan = EvaluationPlan((PlannedSet("held_out", 2, 1), PlannedSet("hard", 1, 3)))
>>> [plan.place(index) for index in range(plan.total)]
[('held_out', 0), ('held_out', 1), ('hard', 0), ('hard', 0), ('hard', 0)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.wire.records.evaluations import HELD_OUT

SHOWN = 4
"""Prompts of each set of which a sample is recorded for people to read: the first ones, so that the
answers of one round can be compared with those of another."""


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """One held-out set as it is evaluated."""

    name: str
    prompts: int
    """How many of its prompts, from its start."""
    samples: int
    """Per prompt."""

    @property
    def total(self) -> int:
        """Samples of all prompts."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The samples of an evaluation, numbered set by set and prompt by prompt."""

    sets: tuple[PlannedSet, ...]

    @property
    def total(self) -> int:
        """Samples of all sets."""
        return sum(one.total for one in self.sets)

    def place(self, index: int) -> tuple[str, int]:
        """(set, prompt of the set) of a sample. Raises IndexError: there is no such sample."""
        for one in self.sets:
            if index < one.total:
                return one.name, index // one.samples
            index -= one.total
        raise IndexError("the evaluation has fewer samples")

    def shown_of(self, index: int) -> str:
        """The set of a sample that is recorded for people to read; "" if it is not.

        Which ones follows from their numbers alone: what they say has no influence.
        """
        for one in self.sets:
            if index < one.total:
                prompt, sample = divmod(index, one.samples)
                return one.name if prompt < SHOWN and sample == 0 else ""
            index -= one.total
        return ""


def plan_of(config: EvaluationConfig, available: Mapping[str, int]) -> EvaluationPlan:
    """The samples of an evaluation.

    Args:
        config: how many prompts and samples are wanted.
        available: prompts of each set, by name: the task's own, and those of `evaluation.sets`.
    """
    planned = []
    for name, prompts in available.items():
        chosen = None if name == HELD_OUT else config.sets[name]
        most = config.prompts if chosen is None or chosen.prompts is None else chosen.prompts
        samples = config.samples if chosen is None or chosen.samples is None else chosen.samples
        planned.append(PlannedSet(name, min(most, prompts), samples))
    return EvaluationPlan(tuple(one for one in planned if one.total))
