"""Finds the checkpoint from which a run continues, and rewinds its records to it.

find_resume_point   choose a checkpoint and check that the run may continue from it; changes nothing
rewind              set newer checkpoints aside and drop the records of steps to repeat

If the controller is killed, the trainer may have saved a step before the controller recorded it. So
a checkpoint holds what the trainer knows of its steps (`asyncrl.wire.records.step.TrainedStep`),
from which missing lines of metrics.jsonl are restored.

Unfinished samples:

unfinished/step-000010/GENERATOR.bin   run-ahead that goes with a checkpoint
unfinished/moved/GENERATOR.bin         what a generator that leaves had
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.jsonl import read_undamaged
from asyncrl.monitoring.records.metrics_log import drop_superseded
from asyncrl.monitoring.records.samples import SampleRecord, recent_files
from asyncrl.monitoring.records.trained_samples import copy_later
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format import files
from asyncrl.trainer.checkpoint.format.files import ResumePoint
from asyncrl.trainer.checkpoint.format.manifest import check_settings, settings_of
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import (
    EnvironmentCounts,
    IdleShares,
    StepGroups,
    StepMetrics,
    TokenCounts,
    TrainedStep,
)
from asyncrl.wire.transport.atomic_files import write_atomically


def unfinished_folder(run: Path, step: int) -> Path:
    """Return the folder of unfinished samples for the checkpoint after `step` steps."""
    return files.path_of(run / "unfinished", step)


def moved_folder(run: Path) -> Path:
    """Return the folder with samples of leaving generators."""
    return run / "unfinished" / "moved"


def remove_moved(run: Path) -> None:
    """Remove that folder, if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(moved_folder(run))


def remove_unfinished(run: Path, *, unless: Callable[[int], bool]) -> None:
    """Remove the folders of steps for which `unless` is false. Raises OSError."""
    for step, folder in files.by_step(run / "unfinished").items():
        if not unless(step):
            shutil.rmtree(folder)


def add_lost(
    recorded: Iterable[StepMetrics],
    trained: Iterable[TrainedStep],
    *,
    groups_per_step: int,
    max_groups: int | None = None,
) -> list[StepMetrics]:
    """Return the recorded steps, with a record for each missing trained step.

    Totals that only the controller knows (`tokens`, `noise_floor`, `reward_failures`,
    `environments`) are copied from the preceding record; other numbers that only it knows are None.
    `recorded` is from metrics.jsonl, `trained` from the checkpoints; `max_groups` is
    `SchedulerConfig.max_groups_of_step`.
    """
    steps = {one.step: one for one in recorded}
    for one in sorted(trained, key=lambda one: one.step):
        if one.step not in steps:
            before = steps.get(one.step - 1)
            end = 0 if before is None else before.groups.end
            groups = _groups_of(one.step, one.groups, groups_per_step, before=end, most=max_groups)
            steps[one.step] = _record(one, before, groups)
    return [steps[step] for step in sorted(steps)]


def _record(one: TrainedStep, before: StepMetrics | None, groups: StepGroups) -> StepMetrics:
    worked = one.times.train_seconds + one.times.publish_seconds + one.times.wait_seconds
    seconds = worked if before is None else max(1e-9, one.time - before.time)
    times = one.times.within(seconds)
    return StepMetrics(
        step=one.step,
        time=one.time,
        groups=groups,
        wall_seconds=seconds + (0.0 if before is None else before.wall_seconds),
        step_seconds=seconds,
        tokens_per_second=None,
        engine_busy_seconds=None,
        tokens=TokenCounts() if before is None else before.tokens,
        noise_floor=NoiseFloor() if before is None else before.noise_floor,
        environments=EnvironmentCounts() if before is None else before.environments,
        idle=IdleShares(generator=None, trainer=min(1.0, times.wait_seconds / max(1e-9, seconds))),
        times=times,
        reward_failures={} if before is None else before.reward_failures,
        **msgspec.structs.asdict(one.metrics),
    )


def _groups_of(
    step: int, trained: Sequence[int], per_step: int, *, before: int = 0, most: int | None = None
) -> StepGroups:
    """Return the groups of a step whose record was lost with the controller.

    Only what the trainer accumulated is known. The other groups must have failed, since the trainer
    steps only when the controller has declared all others. With dynamic sampling they failed or
    carried no signal, and count as the latter, which is frequent. Then `before` is the first group
    after the preceding step, and `most` the maximum number of groups of a step.
    """
    if most is not None:
        end = max(trained) + 1 if len(trained) == per_step else before + most
        left_out = tuple(group for group in range(before, end) if group not in trained)
        return StepGroups(trained=tuple(trained), without_signal=left_out)
    every = range(step * per_step, (step + 1) * per_step)
    return StepGroups(
        trained=tuple(trained), failed=tuple(group for group in every if group not in trained)
    )


def find_resume_point(path: Path, config: RunConfig, step: int | None) -> ResumePoint:
    """Return the newest whole checkpoint of the run at `path`, or the one after `step` steps.

    Raises UserError if none is usable, or if its settings make this another run.
    """
    try:
        point = files.choose(path / "checkpoints", step)
        if point.directory is not None and point.manifest is not None:
            check_settings(point.directory, point.manifest, checkpoint_settings(config))
    except CheckpointError as error:
        raise UserError(str(error)) from error
    return point


def checkpoint_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that this run's trainer writes to its checkpoints."""
    return settings_of(
        config.trainer,
        group_size=config.scheduler.group_size,
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        truncation=config.sampling.truncation,
    )


def rewind(
    path: Path, point: ResumePoint, *, groups_per_step: int, max_groups: int | None = None
) -> list[str]:
    """Bring the checkpoints and records of the run at `path` to the resume point.

    Newer checkpoints are moved aside, after copying the records that belong to them. Missing step
    records are restored from the checkpoints. Unfinished run-ahead of newer checkpoints and samples
    of leaving generators are removed: they are generated again, or go with a checkpoint.

    `max_groups` is `SchedulerConfig.max_groups_of_step`. Return sentences for the user. Raises
    OSError if a file could not be moved or written.
    """
    start = "its first step" if point.directory is None else point.directory.name
    said = [f"{fault}; resuming from {start} instead" for fault in point.faults]
    metrics = path / "metrics.jsonl"
    remove_unfinished(path, unless=lambda step: step <= point.step)
    remove_moved(path)
    aside = files.set_aside(
        path / "checkpoints",
        newer_than=point.step,
        copy_records=lambda target: _copy_records(path, target, from_step=point.step),
    )
    if aside is not None:
        moved = ", ".join(sorted(one.name for one in aside.glob("step-*")))
        said.append(f"{moved}: kept in {aside}, as this run continues after step {point.step}")
    recorded: list[StepMetrics] = []
    if metrics.exists():
        if not metrics.read_bytes().endswith(b"\n") and metrics.stat().st_size:
            said.append(f"the last line of {metrics} was incomplete and is dropped")
        readable, damaged = read_undamaged(metrics, StepMetrics)
        if damaged:
            said.append(_keep_damaged(metrics, damaged))
        recorded = [one for one in drop_superseded(readable) if one.step < point.step]
    missing = set(range(point.step)) - {one.step for one in recorded}
    trained = _trained(path / "checkpoints", point, missing, said)
    steps = add_lost(recorded, trained, groups_per_step=groups_per_step, max_groups=max_groups)
    if metrics.exists() or steps:
        _write_lines(metrics, steps)
    if trained:
        listed = ", ".join(map(str, sorted(one.step for one in trained)))
        said.append(f"{metrics} lacked the records of steps that were saved, now added: {listed}")
    if unknown := missing - {one.step for one in trained}:
        listed = ", ".join(map(str, sorted(unknown)))
        said.append(f"no whole checkpoint has the records of these steps of {metrics}: {listed}")
    _rewind_evaluations(path / "evaluations.jsonl", point.step, said)
    for samples in filter(Path.exists, (path / "samples.jsonl", *recent_files(path))):
        kept, damaged = read_undamaged(samples, SampleRecord)
        if damaged:
            said.append(f"{_dropped(samples, damaged)}. The file is for the report only")
        # A sample of an evaluation has the evaluation's version, as its record does.
        stay = [one for one in kept if one.step < point.step + bool(one.evaluation)]
        _write_lines(samples, stay)
    return said


def _rewind_evaluations(path: Path, step: int, said: list[str]) -> None:
    if not path.exists():
        return
    kept, damaged = read_undamaged(path, EvaluationRecord)
    if damaged:
        said.append(_keep_damaged(path, damaged))
    _write_lines(path, [one for one in kept if one.step <= step])


def _keep_damaged(path: Path, damaged: Sequence[RecordError]) -> str:
    """Copy a file whose damaged lines are about to be dropped; say so."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
    copy = next(name for name in names if not name.exists())
    shutil.copyfile(path, copy)
    return f"{_dropped(path, damaged)}: {damaged[0].reason}. The file as it was is kept as {copy}"


def _dropped(path: Path, damaged: Sequence[RecordError]) -> str:
    first = damaged[0].line
    return f"{len(damaged)} damaged lines of {path} are dropped; the first is line {first}"


def _copy_records(path: Path, target: Path, *, from_step: int) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        if (path / name).exists():
            shutil.copyfile(path / name, target / name)
    copy_later(path / "samples", target / "samples", from_step=from_step)


def _trained(
    checkpoints: Path, point: ResumePoint, missing: set[int], said: list[str]
) -> list[TrainedStep]:
    """Return the trainer's records of missing steps, from this and older checkpoints."""
    found: dict[int, TrainedStep] = {}
    for directory in files.up_to(checkpoints, point.step):
        if missing <= found.keys():
            break
        try:
            steps = files.steps_of(directory)
        except CheckpointError as error:
            said.append(f"{error}; no step record is taken from there")
            continue
        found |= {one.step: one for one in steps if one.step in missing - found.keys()}
    return list(found.values())


def _write_lines(path: Path, records: Sequence[msgspec.Struct]) -> None:
    text = "".join(msgspec.json.encode(one).decode() + "\n" for one in records)
    if not path.exists() or path.read_bytes() != text.encode():
        write_atomically(path, text)
