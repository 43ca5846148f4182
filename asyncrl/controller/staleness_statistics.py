"""The age of the trained tokens over all steps of a run, and which steps were on-policy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

from asyncrl.wire.records.on_policy import OnPolicySteps, is_on_policy
from asyncrl.wire.records.step import StalenessMetrics, StepMetrics


class StalenessTotals:
    """Keeps two numbers and a flag of each step. A step that is trained again replaces itself.

    Args:
        earlier: the steps that the run did before it was resumed.
    """

    def __init__(self, earlier: Iterable[StepMetrics]) -> None:
        self._steps: dict[int, tuple[StalenessMetrics, bool | None]] = {}
        self._flags: Counter[bool | None] = Counter()
        """Steps by whether they were exactly on-policy."""
        for one in earlier:
            self.add(one)

    def add(self, step: StepMetrics) -> None:
        """Note a step."""
        if (replaced := self._steps.get(step.step)) is not None:
            self._flags[replaced[1]] -= 1
        self._steps[step.step] = step.staleness, is_on_policy(step)
        self._flags[is_on_policy(step)] += 1

    def rewind(self, step: int) -> None:
        """Forget this step and all later ones, which are trained again."""
        self._steps = {index: one for index, one in self._steps.items() if index < step}
        self._flags = Counter(flag for _, flag in self._steps.values())

    def staleness(self) -> StalenessMetrics:
        """Mean of the steps' means, and maximum over all steps."""
        ages = [age for age, _ in self._steps.values()]
        return StalenessMetrics(
            mean=statistics.fmean(one.mean for one in ages) if ages else 0.0,
            max=max((one.max for one in ages), default=0),
        )

    def on_policy(self, steps: int) -> OnPolicySteps:
        """How many steps of a run of this many steps were exactly on-policy."""
        return OnPolicySteps.of(self._flags, steps)
