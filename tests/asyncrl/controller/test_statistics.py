"""The groups in step records: what trainer and scheduler said, nothing inferred."""

from __future__ import annotations

from asyncrl.controller.statistics import RunGroups
from asyncrl.monitoring.records.group_account import account_of
from asyncrl.wire.records.step import StepGroups, StepMetrics


def account_after(groups: RunGroups, *trained: tuple[int, ...]) -> tuple[object, ...]:
    records = [
        StepMetrics(step=step, time=1.0, groups=groups.of_step(step, of_step))
        for step, of_step in enumerate(trained)
    ]
    return account_of(records, 4)[1:4]


def test_a_lost_group_and_one_trained_on_twice_in_a_step_are_seen() -> None:
    assert account_after(RunGroups([], 4), (0, 0, 2)) == ((), (1, 3), (0,))


def test_failed_groups_are_those_that_the_scheduler_left_out() -> None:
    groups = RunGroups([], 4)
    groups.failed(1)
    groups.failed(6)
    assert account_after(groups, (0, 2, 3), (4, 5, 7)) == ((1, 6), (), ())


def test_groups_of_steps_that_are_trained_again_have_not_failed() -> None:
    groups = RunGroups([], 4)
    groups.failed(1)
    groups.rewind([])
    assert groups.of_step(0, (0, 1, 2, 3)) == StepGroups(trained=(0, 1, 2, 3))
