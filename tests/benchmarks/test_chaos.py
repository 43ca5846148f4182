"""A run survives the death of its processes, and the benchmark sees it if one does not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from asyncrl.monitoring.records.group_account import account_of
from asyncrl.wire.records.step import BatchMetrics, StalenessMetrics, StepGroups, StepMetrics
from benchmarks.chaos.campaign import Kill, Outcome
from benchmarks.chaos.findings import Findings, compare, p_value


def counted(lengths: np.ndarray) -> Counter[int]:
    return Counter(lengths.tolist())


def test_lengths_of_one_distribution_are_rarely_called_different() -> None:
    """At 5%; 400 pairs give more than 32 false alarms with a probability below 0.5%."""
    random = np.random.default_rng(5)
    alarms = sum(
        p_value(counted(random.geometric(0.05, 300)), counted(random.geometric(0.05, 500))) < 0.05
        for _ in range(400)
    )
    assert alarms <= 32


def test_other_lengths_are_found() -> None:
    random = np.random.default_rng(5)
    longer = counted(random.geometric(0.04, 2000))
    assert p_value(counted(random.geometric(0.05, 2000)), longer) < 1e-6
    assert p_value(longer, longer) == 1.0
    with pytest.raises(ValueError, match="no sample"):
        p_value(longer, Counter())


def steps(groups: list[tuple[int, ...]], *, length: int = 3) -> list[StepMetrics]:
    batch = BatchMetrics(response_lengths={length: 500})
    return [
        StepMetrics(step=i, time=1.0, groups=StepGroups(trained=trained), batch=batch)
        for i, trained in enumerate(groups)
    ]


def outcome_of(records: list[StepMetrics], **more: object) -> Outcome:
    kill = Kill("generator", 1, seconds_to_next_step=9.0, engine_start_seconds=8.0)
    values: dict[str, object] = {
        "kills": [kill], "account": account_of(records, 2), "steps": records, "leftovers": {}
    }  # fmt: skip
    return Outcome("generator", **{**values, **more})  # type: ignore[arg-type]


ALONE = steps([(0, 1), (2, 3), (4, 5)])


def test_a_run_that_lost_nothing_passes() -> None:
    findings = Findings(1, {"generator": outcome_of(ALONE[:2])}, ALONE)
    ratios = findings.ratios()
    assert not findings.failed
    assert (ratios["groups_lost"], ratios["groups_twice"]) == (0, 0)
    assert ratios["seconds_to_next_step_max"] == 9.0
    assert ratios["seconds_beyond_start_max"] == 1.0
    assert findings.raw()["by_type"]["generator"]["same_groups"]
    assert findings.table().row_count == 1


@pytest.mark.parametrize(
    ("outcome", "what"),
    [
        (outcome_of(steps([(0, 1), (3,)])), "groups_lost"),
        (outcome_of(steps([(0, 1), (1, 2, 3)])), "groups_twice"),
        (outcome_of(steps([(0, 1), (3, 2)])), "runs_with_other_groups"),
        (outcome_of(steps([(0, 1), (2, 3)], length=4)), "runs_with_other_lengths"),
        (outcome_of(ALONE, kills=[], failure="it ended"), "not_recovered"),
        (outcome_of(ALONE, leftovers={"processes": 1}), "leftovers"),
        (outcome_of([]), "runs_with_other_groups"),
    ],
)
def test_whatever_a_run_lost_fails_the_benchmark(outcome: Outcome, what: str) -> None:
    findings = Findings(1, {"generator": outcome}, ALONE)
    assert findings.failed
    assert findings.ratios()[what] > 0


def test_stale_tokens_fail_the_benchmark() -> None:
    stale = [StepMetrics(step=0, time=1.0, staleness=StalenessMetrics(max=1))]
    assert outcome_of(stale).staleness_max == 1
    assert compare(outcome_of([]), ALONE) is None
