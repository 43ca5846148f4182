"""The groups of a run, counted over resumes."""

from __future__ import annotations

from collections.abc import Sequence

from monitoring.group_account import totals_of
from scheduler.view import SchedulerView
from wire.records import GroupTotals, StepGroups, StepMetrics


def groups_of_lost_record(step: int, trained: Sequence[int], per_step: int) -> StepGroups:
    """The groups of a step whose record was lost with the controller.

    Only what the trainer accumulated is known. Groups that it left out must have failed, since it
    steps only when the controller has declared all others.
    """
    every = range(step * per_step, (step + 1) * per_step)
    return StepGroups(
        trained=tuple(trained), failed=tuple(group for group in every if group not in trained)
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
        self._failed: set[int] = set()

    def failed(self, group: int) -> None:
        """Note that the scheduler leaves a group out."""
        self._failed.add(group)

    def rewind(self, earlier: Sequence[StepMetrics] | None) -> None:
        """These steps are left (None: unknown); the scheduler's ledger returned to their end."""
        self._failed.clear()  # the groups of later steps are tried again
        if earlier is None:
            return
        self._before = totals_of([one for one in earlier if one.step < self._first_step])

    def of_step(self, step: int, trained: Sequence[int]) -> StepGroups:
        """What was said about the groups of a step: by the trainer, and by the scheduler.

        Nothing is inferred, so a group that neither names shows as lost in
        `monitoring.group_account`, and one that the trainer accumulated twice as such.
        """
        below = (step + 1) * self._per_step
        failed = {group for group in self._failed if group < below}
        self._failed -= failed
        return StepGroups(trained=tuple(trained), failed=tuple(sorted(failed)))

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
