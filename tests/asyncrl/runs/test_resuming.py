"""A resumed run: which checkpoint it continues from, and what happens to everything after it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from sample_records import written
from step_records import full_step
from whole_checkpoints import WEIGHTS, truncate, write_whole

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.errors import UserError
from asyncrl.monitoring.records.metrics_log import read_evaluations, read_metrics
from asyncrl.monitoring.records.samples import (
    RecentSamples,
    SampleLog,
    SampleRecord,
    newest_samples,
    read_samples,
)
from asyncrl.monitoring.records.trained_samples import read_trained_samples
from asyncrl.monitoring.records.trained_samples import truncate as truncate_samples
from asyncrl.monitoring.report.write import write_report
from asyncrl.runs.directory import RunDirectory
from asyncrl.runs.resuming import checkpoint_settings, rewind
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.checkpoint.format.manifest import write_manifest
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import (
    IdleShares,
    LearnerMetrics,
    StepGroups,
    StepMetrics,
    TrainedStep,
    TrainerTimes,
)


def config_in(path: Path, **sections: object) -> RunConfig:
    run = {"name": "mine", "directory": str(path)}
    return parse_config({"run": run, **sections}, source="the test")


def ended_run(path: Path, *checkpoints: int, steps: int = 7) -> Path:
    """The folder of a run that recorded this many steps."""
    config = config_in(path)
    made = RunDirectory.create(config, resume=False, clean=False)
    made.close()
    settings = checkpoint_settings(config)
    write_whole(made.path / "checkpoints", *checkpoints, settings=settings)
    lines = [msgspec.json.encode(StepMetrics(step=at, time=1.0 + at)) for at in range(steps)]
    (made.path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return made.path


def resume(path: Path, step: int | None = None, **sections: object) -> list[str]:
    """Resume the run; what the user is told."""
    config = config_in(path, **sections)
    opened = RunDirectory.create(config, resume=True, clean=False, resume_from=step)
    try:
        return rewind(opened.path, opened.resume_point, groups_per_step=2)
    finally:
        opened.close()


def save_steps(path: Path, version: int, steps: Iterable[int]) -> Path:
    """Save a checkpoint with what the trainer knows of these steps."""
    known = full_step()
    saved = [
        TrainedStep(
            step=at,
            time=1.5 + at,
            groups=(2 * at,),
            metrics=LearnerMetrics(learning=known.learning, batch=known.batch),
            times=TrainerTimes(train_seconds=0.25, wait_seconds=0.5),
        )
        for at in steps
    ]
    config = config_in(path)
    directory = path_of(config.directory / "checkpoints", version)
    directory.mkdir()
    lines = [msgspec.json.encode(one) + b"\n" for one in saved]
    (directory / "steps.jsonl").write_bytes(b"".join(lines))
    write_manifest(directory, policy_version=version, settings=checkpoint_settings(config))
    return directory


def recorded(folder: Path) -> list[int]:
    return [one.step for one in read_metrics(folder / "metrics.jsonl")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_what_leaving_generators_wrote_before_a_kill_is_removed(tmp_path: Path) -> None:
    path = ended_run(tmp_path, 2, 4)
    moved, saved = path / "unfinished/moved/g.bin", path / "unfinished/step-000004/g.bin"
    for file in (moved, saved):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"tokens")
    resume(tmp_path)
    assert not moved.exists()
    assert saved.exists()


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path,
) -> None:
    folder = ended_run(tmp_path, 4, 6)
    truncate(folder / "checkpoints" / "step-000006" / WEIGHTS)
    fault, moved = resume(tmp_path)
    assert f"step-000006/{WEIGHTS} is truncated: " in fault
    assert fault.endswith("; resuming from step-000004 instead")
    aside = folder / "checkpoints" / "set-aside" / "after-000004"
    assert moved.startswith(f"step-000006: kept in {aside}")
    assert (aside / "step-000006" / "manifest.json").exists()
    assert recorded(folder) == [0, 1, 2, 3]
    assert recorded(aside) == [0, 1, 2, 3, 4, 5, 6]


def test_evaluations_of_later_steps_go_with_the_course_that_was_left(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 2, 4, 6)
    made = [EvaluationRecord(step=step, time=1.0, when="during") for step in (0, 2, 4, 6)]
    path = folder / "evaluations.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in made))
    resume(tmp_path, 4)
    assert read_evaluations(path) == made[:3]
    aside = folder / "checkpoints" / "set-aside" / "after-000004"
    assert read_evaluations(aside / "evaluations.jsonl") == made


def test_a_resume_from_an_older_step_keeps_the_newer_ones_aside(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 2, 4, 6)
    (moved,) = resume(tmp_path, 2)
    assert "step-000004, step-000006: kept in" in moved
    assert recorded(folder) == [0, 1]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "set-aside",
        "step-000002",
    ]


def test_nothing_is_said_or_moved_when_the_newest_is_whole(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 4, 6)
    assert resume(tmp_path) == []
    assert recorded(folder) == [0, 1, 2, 3, 4, 5]


def test_an_incomplete_last_line_is_dropped_and_said(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 6)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "ti')
    (said,) = resume(tmp_path)
    assert "metrics.jsonl was incomplete and is dropped" in said
    assert recorded(folder) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("step", "says"),
    [(None, "none of the checkpoints"), (4, "truncated.*: none"), (5, "no checkpoint of step 5")],
)
def test_a_resume_that_is_refused_changes_nothing(
    step: int | None, says: str, tmp_path: Path
) -> None:
    folder = ended_run(tmp_path, 4)
    truncate(folder / "checkpoints" / "step-000004" / WEIGHTS)
    (folder / "result.json").write_text("{}")
    assert (folder / ".trainer").exists()
    before = contents(folder)
    with pytest.raises(UserError, match=says):
        resume(tmp_path, step)
    assert contents(folder) == before


def test_settings_of_another_run_are_refused_before_anything_is_moved(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 2, 4)
    before = contents(folder)
    with pytest.raises(UserError, match=r"betas: \[0\.9, 0\.999\] -> \[0\.5, 0\.5\]"):
        resume(tmp_path, 2, trainer={"betas": (0.5, 0.5)})
    with pytest.raises(UserError, match=r"stop was \[\] and is now \[.END.\]"):
        resume(tmp_path, 2, sampling={"stop": ["END"]})
    assert contents(folder) == before
    assert len(resume(tmp_path, 2, trainer={"learning_rate": 1e-3})) == 1
    resume(tmp_path, 2, sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 8, "min_p": 0.1})


def test_a_run_without_a_checkpoint_starts_at_its_first_step(tmp_path: Path) -> None:
    folder = ended_run(tmp_path)
    assert resume(tmp_path) == []
    assert recorded(folder) == []


def test_a_line_that_a_killed_controller_did_not_write_is_added_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    folder = ended_run(tmp_path, steps=3)
    save_steps(tmp_path, 5, range(1, 5))
    known = full_step()
    before = read_metrics(folder / "metrics.jsonl")
    (said,) = resume(tmp_path)
    assert said.endswith("now added: 3, 4")
    after = read_metrics(folder / "metrics.jsonl")
    assert after[:3] == before, "what the controller wrote stays as it is"
    assert [one.step for one in after] == [0, 1, 2, 3, 4]
    third, fourth = after[3:]
    assert third.learning == known.learning
    assert third.groups == StepGroups(trained=(6,), failed=(7,))
    assert (third.time, third.step_seconds, third.wall_seconds) == (4.5, 1.5, 1.5)
    assert (fourth.step_seconds, fourth.wall_seconds) == (1.0, 2.5)
    assert third.idle == IdleShares(generator=None, trainer=0.5 / 1.5)
    assert third.tokens_per_second is None
    (folder / "metrics.jsonl").unlink()
    resume(tmp_path)
    assert recorded(folder) == [1, 2, 3, 4]
    assert write_report(folder).exists()


def test_lines_lost_over_several_checkpoints_are_added_from_all_of_them(tmp_path: Path) -> None:
    folder = ended_run(tmp_path)
    (folder / "metrics.jsonl").unlink()
    for version in (1, 2, 3):
        save_steps(tmp_path, version, [version - 1])
    (said,) = resume(tmp_path)
    assert said.endswith("now added: 0, 1, 2")
    assert recorded(folder) == [0, 1, 2]
    (folder / "metrics.jsonl").unlink()
    truncate(path_of(folder / "checkpoints", 2) / "steps.jsonl")
    fault, said, unknown = resume(tmp_path)
    assert "step-000002/steps.jsonl is truncated" in fault
    assert said.endswith("now added: 0, 2")
    assert unknown.endswith("metrics.jsonl: 1")


def test_damaged_lines_of_the_metrics_are_taken_from_checkpoints(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, steps=4)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], lines[1][:9] + b"\n", b"\xff\n", lines[3]])
    (folder / "metrics.jsonl").write_bytes(damaged)
    save_steps(tmp_path, 4, [1])
    kept, added, unknown = resume(tmp_path)
    assert "2 damaged lines of" in kept
    assert "the first is line 2" in kept
    assert (folder / "metrics.jsonl.damaged-1").read_bytes() == damaged
    assert added.endswith("now added: 1")
    assert unknown.endswith("metrics.jsonl: 2")
    assert recorded(folder) == [0, 1, 3]


def test_damaged_samples_of_the_report_do_not_stop_a_resume(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 2, 4)
    (folder / "samples.jsonl").write_bytes(b'{"step": 1, "gro\n\xff\n{"st')
    moved, said = resume(tmp_path, 2)
    assert "2 damaged lines of" in said
    assert "the first is line 1" in said
    assert (folder / "samples.jsonl").read_bytes() == b""
    assert recorded(folder) == [0, 1]
    assert "step-000004: kept in" in moved


def test_samples_of_an_evaluation_stay_with_its_record(tmp_path: Path) -> None:
    folder = ended_run(tmp_path, 2, 4)
    kinds = [(1, ""), (2, ""), (2, "held_out"), (3, "held_out")]
    log = SampleLog(folder / "samples.jsonl")
    log.append(*(SampleRecord(at, "", [], [], [], 1.0, evaluation=kind) for at, kind in kinds))
    log.close()
    recent = RecentSamples(folder / "recent" / "generator-0.jsonl")
    for step in (1, 3):
        recent.append(SampleRecord(step, "", [], [], [], 1.0, sample_id=f"{step}.0"))
    recent.close()
    resume(tmp_path, 2)
    left = [(one.step, one.evaluation) for one in read_samples(folder / "samples.jsonl")]
    assert left == [(1, ""), (2, "held_out")]
    assert [one.step for one in newest_samples(folder, 9)] == [1, 1], "step 3 is trained again"


def test_records_are_copied_before_a_checkpoint_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended_run(tmp_path, 2, 4, 6)
    written(folder / "samples", steps=6)

    def die(*_: object) -> None:
        raise KeyboardInterrupt  # as if killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path, 2)
    first = folder / "checkpoints" / "set-aside" / "after-000002"
    assert recorded(first) == recorded(folder) == [0, 1, 2, 3, 4, 5, 6]
    resume(tmp_path, 2)
    truncate_samples(folder / "samples", before_step=2)  # as the trainer does
    second = first.with_name("after-000002.2")
    assert sorted(path.name for path in second.iterdir()) == [
        "metrics.jsonl",
        "samples",
        "step-000004",
        "step-000006",
    ]
    for aside in (first, second):
        steps = {one.step for one in read_trained_samples(aside / "samples")}
        assert steps >= {2, 3, 4, 5}
    assert {one.step for one in read_trained_samples(folder / "samples")} == {0, 1}
    assert recorded(folder) == [0, 1]
