"""What a run says of the age of its tokens is said of all its steps."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.statistics import StepTotals
from asyncrl.monitoring.records.metrics_log import MetricsLog, read_metrics
from asyncrl.runs.resuming import add_lost
from asyncrl.wire.records.step import (
    LearnerMetrics,
    OnPolicySteps,
    StalenessMetrics,
    StepMetrics,
    TrainedStep,
    TrainerTimes,
)


def step_of(step: int, exactly: bool | None, largest: int = 0) -> StepMetrics:
    staleness = StalenessMetrics(mean=largest / 2, max=largest)
    return StepMetrics(step=step, time=1.0, exactly_on_policy=exactly, staleness=staleness)


def test_one_step_that_was_not_on_policy_decides_for_the_run() -> None:
    totals = StepTotals(step_of(step, exactly=False) for step in range(90))
    for step in range(90, 100):
        totals.add(step_of(step, exactly=True))
    assert totals.on_policy(100) == OnPolicySteps(yes=10, no=90)
    assert totals.on_policy(100).exactly is False


def test_a_step_that_is_trained_again_replaces_itself() -> None:
    totals = StepTotals([step_of(0, exactly=True), step_of(1, exactly=False, largest=3)])
    totals.rewind(1)
    assert totals.staleness() == StalenessMetrics()
    totals.add(step_of(1, exactly=True))
    assert totals.on_policy(2).exactly is True
    totals.add(step_of(1, exactly=False))  # its record could not be dropped
    assert totals.on_policy(2) == OnPolicySteps(yes=1, no=1)
    totals.add(step_of(1, exactly=True))
    assert totals.on_policy(2) == OnPolicySteps(yes=2)


def test_records_of_earlier_versions_say_only_what_their_staleness_tells() -> None:
    old = [step_of(0, exactly=None), step_of(1, exactly=True)]
    assert StepTotals(old).on_policy(2).exactly is None
    stale = StepTotals([*old, step_of(2, exactly=None, largest=1)])
    assert stale.on_policy(3) == OnPolicySteps(yes=1, no=1, unknown=1)
    assert stale.staleness() == StalenessMetrics(mean=0.5 / 3, max=1)
    assert StepTotals([step_of(1, exactly=True)]).on_policy(2).exactly is None, "a lost record"
    assert StepTotals([]).on_policy(0).exactly is True


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([True, False, None]))))
def test_counts_are_those_of_the_newest_record_of_each_step(
    records: list[tuple[int, bool | None]],
) -> None:
    totals = StepTotals([])
    for step, flag in records:
        totals.add(step_of(step, flag))
    newest = list(dict(records).values())
    expected = OnPolicySteps(newest.count(True), newest.count(False), 9 - len(newest))
    assert totals.on_policy(9) == expected._replace(unknown=9 - expected.yes - expected.no)


def test_the_flag_of_a_step_is_in_the_checkpoint_too() -> None:
    """The controller may be killed before it has recorded a step."""
    metrics = LearnerMetrics(exactly_on_policy=False)
    trained = TrainedStep(step=0, time=1.0, groups=(0,), metrics=metrics, times=TrainerTimes())
    kept = msgspec.json.decode(msgspec.json.encode(trained), type=TrainedStep)
    assert add_lost([], [kept], groups_per_step=1)[0].exactly_on_policy is False


def test_a_line_without_the_flag_is_read(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_of(0, exactly=True))
    log.close()
    line = msgspec.json.decode((tmp_path / "metrics.jsonl").read_bytes())
    assert line.pop("exactly_on_policy") is True
    (tmp_path / "metrics.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    assert StepTotals(read_metrics(tmp_path / "metrics.jsonl")).on_policy(1).exactly is None
