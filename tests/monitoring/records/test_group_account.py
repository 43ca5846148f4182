"""Each group of a run is trained on once, or it is found in the records that it was not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.monitoring.records.group_account import account_of, main, read_account
from asyncrl.monitoring.records.metrics_log import MetricsLog
from asyncrl.wire.records.step import StepGroups, StepMetrics


def step(index: int, trained: tuple[int, ...], failed: tuple[int, ...] = ()) -> StepMetrics:
    return StepMetrics(step=index, time=1.0, groups=StepGroups(trained=trained, failed=failed))


@given(st.data(), st.integers(1, 5), st.integers(0, 6))
def test_lost_and_repeated_groups_are_found(data: st.DataObject, per_step: int, steps: int) -> None:
    every = list(range(per_step * steps))
    some = st.sets(st.sampled_from(every)) if every else st.just(set())
    lost, failed, twice = data.draw(some), data.draw(some), data.draw(some)
    failed -= lost
    twice -= lost | failed
    records = []
    for index in range(steps):
        own = set(every[index * per_step : (index + 1) * per_step])
        trained = own - lost - failed
        records.append(step(index, tuple(sorted(trained)), tuple(sorted(own & failed))))
    if steps:
        records[-1] = step(
            steps - 1,
            (*records[-1].groups.trained, *sorted(twice)),
            records[-1].groups.failed,
        )
    account = account_of(records, per_step)
    assert set(account.lost) == lost
    assert set(account.failed) == failed
    assert set(account.twice) == twice
    assert account.is_exact == (not lost and not twice)


def test_the_groups_of_a_missing_step_are_lost() -> None:
    account = account_of([step(0, (0, 1)), step(2, (4, 5))], groups_per_step=2)
    assert account.lost == (2, 3)


def test_a_run_is_checked_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("scheduler: {groups_per_step: 2}\n")
    with_log = MetricsLog(tmp_path / "metrics.jsonl")
    for record in (step(0, (0, 1)), step(1, (2,), failed=(3,)), step(1, (2, 3))):
        with_log.append(record)
    assert read_account(tmp_path).is_exact, "a superseded record counts for nothing"
    assert main([str(tmp_path)]) == 0
    with_log.append(step(2, (3, 5)))
    with_log.close()
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("lost: 1 [4]\ntwice: 1 [3]\n")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["scheduler: {}", "[]", "{", "9" * 6_000, "[" * 100_000])
def test_a_folder_without_a_usable_configuration_is_misuse(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert "lacks a number for scheduler.groups_per_step" in capsys.readouterr().err
