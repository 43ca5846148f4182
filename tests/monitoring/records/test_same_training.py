"""Two runs are compared without their times: records by bytes, weights by digest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.monitoring.records.metrics_log import MetricsLog
from asyncrl.monitoring.records.same_training import TIMES, difference, main, without_times
from asyncrl.wire.records.step import LearnerMetrics, LearningMetrics, StepGroups, StepMetrics

LATE = {"wall_seconds": 9.0, "tokens_per_second": 3.0}


def run_of(folder: Path, steps: list[StepMetrics], weights: bytes = b"w") -> Path:
    model = folder / "checkpoints" / "step-000002" / "state"
    model.mkdir(parents=True)
    (model / "weights-00000-00001.safetensors").write_bytes(weights)
    log = MetricsLog(folder / "metrics.jsonl")
    for one in steps:
        log.append(one)
    log.close()
    return folder


def steps(reward: float = 1.0, **late: float) -> list[StepMetrics]:
    learning = LearningMetrics(reward_mean=reward)
    return [StepMetrics(step=i, time=float(i), learning=learning, **late) for i in range(2)]


def test_all_that_the_learner_measures_is_compared() -> None:
    assert set(StepMetrics.__struct_fields__) >= TIMES
    assert not TIMES & set(LearnerMetrics.__struct_fields__)
    assert set(msgspec.json.decode(without_times(steps()[0]))) == {
        "step",
        "groups",
        "rewards",
        "wrong_policy",
        *LearnerMetrics.__struct_fields__,
    }


def test_runs_that_differ_in_times_only_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run_of(tmp_path / "a", steps()), run_of(tmp_path / "b", steps(**LATE))
    assert main([str(one), str(two)]) == 0
    assert "2 steps are the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("others", "weights", "found"),
    [
        (steps(reward=1.0 + 4e-16), b"w", "step 0: learning differ"),
        (
            [steps()[0], msgspec.structs.replace(steps()[1], groups=StepGroups(trained=(1,)))],
            b"w",
            "step 1: groups differ",
        ),
        (steps()[:1], b"w", "has 2 steps and"),
        (steps(), b"v", "step-000002/state/weights-00000-00001.safetensors: the weights differ"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, others: list[StepMetrics], weights: bytes, found: str
) -> None:
    one, two = run_of(tmp_path / "a", steps()), run_of(tmp_path / "b", others, weights)
    assert found in (difference(one, two) or "")
    assert main([str(one), str(two)]) == 1


def test_a_folder_without_a_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), str(run_of(tmp_path / "a", steps()))]) == 2
    assert "is missing or empty" in capsys.readouterr().err
    assert main([]) == 2
