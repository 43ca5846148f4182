"""Which step is the best, which checkpoints stay for it, and what a run that goes back keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_checkpoints import write_whole

from asyncrl.config.run_config import parse_config
from asyncrl.errors import ConfigError
from asyncrl.evaluation.results import EvaluationResults, best_of
from asyncrl.monitoring.records.metrics_log import read_evaluations
from asyncrl.runs.resuming import rewind
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.trainer.checkpoint.format.files import ResumePoint, path_of, prune
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation


def record(step: int, accuracy: float | None, hard: float = 0.0) -> EvaluationRecord:
    values = {"held_out": accuracy, "hard": hard}
    sets = {
        name: SetEvaluation(prompts=4, samples=4, accuracy=value, accuracy_error=0.1)
        for name, value in values.items()
    }
    return EvaluationRecord(
        step=step, time=float(step), when="during" if step else "before", sets=sets
    )


def config(**values: object) -> EvaluationConfig:
    sets = {"hard": {"path": "hard.jsonl"}}
    return EvaluationConfig.model_validate({"every": 2, "keep_best": True, "sets": sets, **values})


def left(checkpoints: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*"))


def test_the_best_is_the_earliest_of_the_highest_and_never_the_model_before_training() -> None:
    records = [record(0, 0.9), record(2, 0.5, 0.1), record(4, 0.7), record(6, 0.7, 0.3)]
    assert best_of(records, None) == records[2]
    assert best_of(records, "hard") == records[3]
    assert best_of(records[:1], None) is None
    assert best_of([record(2, None), record(4, 0.0), record(6, None)], None) == record(4, 0.0)
    assert best_of([record(2, None)], None) is None


def test_the_best_checkpoint_stays_and_so_does_one_that_may_turn_out_to_be(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    results = EvaluationResults(tmp_path, config())
    for step, accuracy in ((1, None), (2, 0.6), (3, None), (4, 0.5), (5, None), (6, None)):
        [written] = write_whole(checkpoints, step)
        prune(checkpoints, 1, written=written)
        if accuracy is not None:
            results.add(record(step, accuracy))
    # 2 is the best, 6 is not evaluated yet; 4 was, and 5 is no multiple of `every`.
    assert left(checkpoints) == [2, 6]
    results.settled(6)  # given up
    [written] = write_whole(checkpoints, 7)
    prune(checkpoints, 1, written=written)
    assert left(checkpoints) == [2, 7]
    best = json.loads((checkpoints / "best.json").read_text())
    assert (best["step"], best["accuracy"], best["of"], best["known"]) == (2, 0.6, "held_out", 6)
    results.configure(config(keep_best=False))
    [written] = write_whole(checkpoints, 8)
    prune(checkpoints, 1, written=written)
    assert left(checkpoints) == [8]


def test_nothing_is_removed_while_the_best_is_not_known_for_sure(tmp_path: Path) -> None:
    write_whole(tmp_path, 1, 2, 3)
    (tmp_path / "best.json").write_text("{")
    prune(tmp_path, 1, written=path_of(tmp_path, 3))
    assert left(tmp_path) == [1, 2, 3]


def test_a_run_that_goes_back_forgets_later_evaluations(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    results = EvaluationResults(tmp_path, config(best_of="hard"))
    for step in (0, 2, 4):
        results.add(record(step, 0.1, hard=step / 10))
    assert results.best is not None
    assert results.best.step == 4
    rewind(tmp_path, ResumePoint(step=3), groups_per_step=1)
    results.reload()
    assert [one.step for one in read_evaluations(tmp_path / "evaluations.jsonl")] == [0, 2]
    assert (results.newest_step, results.best.step) == (2, 2)
    again = record(4, 0.3)
    results.add(again)
    assert EvaluationResults(tmp_path, config()).records[-1] == again


def test_a_resumed_run_of_an_earlier_version_knows_its_accuracy_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    results = EvaluationResults(tmp_path, config())
    before = results.began_with(0.75, 100)
    assert before.main is not None
    assert before.main.accuracy == 0.75
    assert before.main.interval == pytest.approx((0.657, 0.825), abs=1e-3)
    assert results.began_with(0.1, 3) is before


@pytest.mark.parametrize(
    ("evaluation", "wrong"),
    [
        ({"keep_best": True}, "keep_best: true needs evaluation.every"),
        ({"keep_best": True, "every": 30}, "not a multiple of trainer.checkpoint_every"),
        ({"best_of": "hrd", "sets": {"hard": {"path": "x"}}}, "there is no set 'hrd'"),
        ({"sets": {"held_out": {"path": "x"}}}, "the task's held-out prompts"),
        ({"sets": {"a b": {"path": "x"}}}, "cannot name a set"),
        ({"sets": {"hard": {"paht": "x"}}}, r"sets.hard.paht: there is no such key. .*'path'"),
        ({"sets": {"hard": {"path": "x", "samples": True}}}, r"sets.hard.samples: must be a numb"),
        ({"sets": {"hard": {"path": "x", "samples": 0}}}, r"sets.hard.samples: .*Samples per"),
    ],
)
def test_settings_that_cannot_be_are_refused(evaluation: dict[str, object], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse_config({"evaluation": evaluation}, source="the test")
