"""The groups of a run, counted over resumes."""

from __future__ import annotations

from collections.abc import Sequence

from monitoring.group_account import totals_of
from scheduler.view import SchedulerView
from wire.messages.from_trainer import StepFinished
from wire.records import GroupTotals, StepGroups, StepMetrics


def groups_of_step(step: int, trained: Sequence[int], per_step: int) -> StepGroups:
    """What became of each group of a step; those that were not trained on had failed."""
    every = range(step * per_step, (step + 1) * per_step)
    known = set(trained)
    return StepGroups(
        trained=tuple(sorted(known)),
        failed=tuple(group for group in every if group not in known),
    )


class RunGroups:
    """Counts what became of a run's groups.

    The scheduler's ledger begins with this process. What earlier processes did follows from the
    records of their steps, each of which names its groups.

    Args:
        earlier: the steps that the run did before it was resumed.
        per_step: groups of a step.
    """

    def __init__(self, earlier: Sequence[StepMetrics], per_step: int) -> None:
        self._first_step = earlier[-1].step + 1 if earlier else 0
        self._before = totals_of(earlier)
        self._per_step = per_step

    def rewind(self, earlier: Sequence[StepMetrics]) -> None:
        """These steps are left; the scheduler's ledger returned to the end of them."""
        self._before = totals_of([one for one in earlier if one.step < self._first_step])

    def of_step(self, finished: StepFinished) -> StepGroups:
        """What became of each group of a step."""
        return groups_of_step(finished.step, finished.groups, self._per_step)

    def settled(self, snapshot: SchedulerView | None) -> GroupTotals:
        """The groups settled by the whole run; before training those of earlier processes."""
        if snapshot is None:
            return self._before
        return self._before + GroupTotals(
            trained=snapshot.groups_consumed, failed=snapshot.groups_failed
        )


def in_flight(snapshot: SchedulerView) -> int:
    """Groups issued and not settled."""
    return snapshot.groups_issued - snapshot.groups_consumed - snapshot.groups_failed
