"""The groups of a run, counted over resumes."""

from __future__ import annotations

from collections.abc import Sequence

from monitoring.group_account import totals_of
from scheduler.view import SchedulerView
from wire.messages.from_trainer import StepFinished
from wire.records import GroupTotals, StepGroups, StepMetrics


class RunGroups:
    """Counts what became of a run's groups.

    The scheduler's ledger begins with this process. What earlier processes did follows from the
    records of their steps, each of which names its groups.

    Args:
        earlier: the steps that the run did before it was resumed.
        per_step: groups of a step.
    """

    def __init__(self, earlier: Sequence[StepMetrics], per_step: int) -> None:
        self._before = totals_of(earlier)
        self._per_step = per_step

    def of_step(self, finished: StepFinished) -> StepGroups:
        """What became of each group of a step; those that were not trained on had failed."""
        trained = set(finished.groups)
        every = range(finished.step * self._per_step, (finished.step + 1) * self._per_step)
        return StepGroups(
            trained=tuple(sorted(trained)),
            failed=tuple(group for group in every if group not in trained),
        )

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
