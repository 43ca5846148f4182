"""The groups of a run, counted over resumes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.monitoring.records.group_account import totals_of
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.view import SchedulerView
from asyncrl.wire.records.step import GroupTotals, StepGroups, StepMetrics


def too_few_groups(step: StepMetrics, settings: SchedulerConfig) -> str | None:
    """That dynamic sampling found too few groups with signal for a step; None if it did not."""
    groups, most = step.groups, settings.max_groups_of_step
    if most is None or len(groups.trained) >= settings.groups_per_step:
        return None
    return (
        f"step {step.step} trained on {len(groups.trained)} groups instead of "
        f"{settings.groups_per_step}: of the {most} that it may look at "
        f"(scheduler.dynamic_sampling.max_batches), {len(groups.without_signal)} carry no signal "
        f"and {len(groups.failed)} failed"
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
        self._ends = {0: 0} | {one.step + 1: one.groups.end for one in earlier if one.groups.end}
        self._per_step = per_step
        self._failed: set[int] = set()
        self._without_signal: set[int] = set()

    def first_groups(self, step: int) -> dict[int, int]:
        """Where the steps up to this one begin, with dynamic sampling."""
        return {at: group for at, group in self._ends.items() if at <= step}

    def without_signal(self, group: int) -> None:
        """Note that the scheduler leaves a group out because it carries no signal."""
        self._without_signal.add(group)

    def failed(self, group: int) -> None:
        """Note that the scheduler leaves a group out."""
        self._failed.add(group)

    def rewind(self, earlier: Sequence[StepMetrics] | None) -> None:
        """These steps are left (None: unknown); the scheduler's ledger returned to their end."""
        self._failed.clear()  # the groups of later steps are tried again
        self._without_signal.clear()
        if earlier is None:
            return
        self._before = totals_of([one for one in earlier if one.step < self._first_step])

    def of_step(self, step: int, trained: Sequence[int], end: int | None = None) -> StepGroups:
        """What was said about the groups of a step: by the trainer, and by the scheduler.

        `end` is the first group of the next step, if steps do not have equally many.

        Nothing is inferred, so a group that neither names shows as lost in
        `monitoring.records.group_account`, and one that the trainer accumulated twice as such.
        """
        below = (step + 1) * self._per_step if end is None else end
        failed = {group for group in self._failed if group < below}
        without = {group for group in self._without_signal if group < below}
        self._failed -= failed
        self._without_signal -= without
        return StepGroups(
            trained=tuple(trained),
            failed=tuple(sorted(failed)),
            without_signal=tuple(sorted(without)),
        )

    def settled(self, snapshot: SchedulerView | None) -> GroupTotals:
        """The groups settled by the whole run; before training those of earlier processes."""
        if snapshot is None:
            return self._before
        return self._before + GroupTotals(
            trained=snapshot.groups_consumed,
            failed=snapshot.groups_failed,
            without_signal=snapshot.groups_without_signal,
        )


def in_flight(snapshot: SchedulerView) -> int:
    """Groups issued and not settled."""
    settled = snapshot.groups_consumed + snapshot.groups_failed + snapshot.groups_without_signal
    return snapshot.groups_issued - settled
