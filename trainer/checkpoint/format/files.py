"""Finds, chooses and removes checkpoints, without importing torch.

The controller chooses the checkpoint that a run or a restarted trainer continues from, and tells
the trainer its step, so the two cannot disagree. `trainer.checkpoint.checkpoint` writes and loads
them.

    point = choose(run / "checkpoints")
    aside = set_aside(run / "checkpoints", newer_than=point.step)

Which checkpoints are kept for their accuracy (`evaluation.keep_best`).

The controller, which evaluates, writes `checkpoints/best.json`; whoever removes old checkpoints
reads it. Without the file none is spared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.index import WEIGHTS
from asyncrl.trainer.checkpoint.format.manifest import (
    Manifest,
    has_its_files,
    read_manifest,
    verify_files,
)
from asyncrl.wire.records.step import TrainedStep
from asyncrl.wire.transport.atomic_files import write_atomically

NAME = "best.json"


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of best.json."""

    every: int
    """`evaluation.every`: multiples of it are evaluated."""
    known: int
    """The accuracy of steps up to this one is known, or will never be."""
    step: int | None = None
    """The step with the best accuracy; None: there is none yet."""
    accuracy: float | None = None
    """Its accuracy, 0 to 1."""
    of: str = ""
    """The set that it was measured on."""

    def spares(self, step: int) -> bool:
        """Whether the checkpoint of a step must stay: it is the best, or may turn out to be."""
        return step == self.step or (step > self.known and step % self.every == 0)


def write_best(checkpoints: Path, best: BestCheckpoint | None) -> None:
    """Replace best.json, or remove it. Raises OSError."""
    if best is None:
        (checkpoints / NAME).unlink(missing_ok=True)
    else:
        text = msgspec.json.format(msgspec.json.encode(best), indent=2).decode()
        write_atomically(checkpoints / NAME, text + "\n")


def read_best(checkpoints: Path) -> BestCheckpoint | None:
    """The contents of best.json; None if there is none.

    Raises:
        OSError, msgspec.DecodeError: it cannot be read.
    """
    try:
        return msgspec.json.decode((checkpoints / NAME).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return None


def spared(checkpoints: Path) -> Callable[[int], bool]:
    """Whether the checkpoint of a step must stay. If best.json cannot be read, all must."""
    try:
        best = read_best(checkpoints)
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("no checkpoint is removed: %s: %s", checkpoints / NAME, error)
        return lambda _: True
    return (lambda _: False) if best is None else best.spares


logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6,})")
_ASIDE = "set-aside"
STEPS = "steps.jsonl"
"""In a checkpoint: a `TrainedStep` for each step since the checkpoint before."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run continues."""

    directory: Path | None = None
    """A verified checkpoint; None: the run starts at its first step."""
    step: int = 0
    """Steps trained in this checkpoint; the next step to train has this index."""
    manifest: Manifest | None = None
    """Of this checkpoint."""
    faults: tuple[str, ...] = ()
    """For each newer checkpoint that cannot be used, newest first: its path and what is wrong."""


def path_of(checkpoints: Path, step: int) -> Path:
    """The checkpoint after this many steps."""
    return checkpoints / f"step-{step:06d}"


def choose(checkpoints: Path, step: int | None = None) -> ResumePoint:
    """The newest whole checkpoint, or the one after `step` steps. Changes nothing.

    Every file of the chosen checkpoint and of the damaged ones before it is read once.

    Raises:
        CheckpointError: there is no whole checkpoint but a damaged one, or the one asked for is
            damaged or absent; says what can be done.
    """
    found = sorted(by_step(checkpoints).items(), reverse=True)
    if step is not None:
        return _chosen(checkpoints, step)
    faults: list[str] = []
    for at, directory in found:
        try:
            return ResumePoint(directory, at, verified(directory), tuple(faults))
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(
            f"none of the checkpoints in {checkpoints} is whole. " + ". ".join(faults) + ". "
            "Restore one of them from a copy, start the run again with --clean, or start a new "
            "run" + _from_weights([directory for _, directory in found])
        )
    return ResumePoint()


def newest_complete(checkpoints: Path) -> int | None:
    """Step of the newest checkpoint that has all its files, by their sizes; None without one.

    Quick, for messages and to count: contents are not read.
    """
    steps = sorted(by_step(checkpoints).items(), reverse=True)
    return next((step for step, directory in steps if has_its_files(directory)), None)


def dtype_of(directory: Path) -> str | None:
    """`trainer.dtype` of what wrote a checkpoint; None: its manifest does not say.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    found = read_manifest(directory).settings.get("dtype")
    return found if isinstance(found, str) else None


def dtype_of_run(checkpoints: Path) -> str | None:
    """`trainer.dtype` of a run, by the newest manifest that can be read; None without one."""
    for _, directory in sorted(by_step(checkpoints).items(), reverse=True):
        with contextlib.suppress(CheckpointError):
            return dtype_of(directory)
    return None


def up_to(checkpoints: Path, step: int) -> list[Path]:
    """The checkpoints after at most this many steps, whole or damaged, newest first."""
    found = sorted(by_step(checkpoints).items(), reverse=True)
    return [directory for at, directory in found if at <= step]


def steps_of(directory: Path) -> list[TrainedStep]:
    """The steps that a checkpoint was written after, since the one before.

    Raises:
        CheckpointError: they cannot be read, or do not match their digest. The digests of other
            files are not computed.
    """
    verify_files(directory, read_manifest(directory), only=(STEPS,))
    try:
        return read_jsonl(directory / STEPS, TrainedStep)
    except FileNotFoundError:
        return []
    except (OSError, RecordError) as error:
        raise CheckpointError(f"{directory / STEPS} cannot be read: {error}") from error


def verified(directory: Path) -> Manifest:
    """Read a whole checkpoint once and return its manifest.

    Raises:
        CheckpointError: it is not whole; names the file and what is wrong with it.
    """
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    name = _NAME.fullmatch(directory.name)
    if name is not None and int(name[1]) != manifest.policy_version:
        raise CheckpointError(
            f"{directory} holds step {manifest.policy_version} by its manifest, so it was renamed "
            "or mixed up"
        )
    return manifest


def set_aside(
    checkpoints: Path, *, newer_than: int, copy_records: Callable[[Path], None] | None = None
) -> Path | None:
    """Move every checkpoint after this many steps, whole or damaged, to a folder of its own.

    They belong to another course of the run than the one that continues from there, which will
    write others of these names. Nothing is removed.

    Args:
        checkpoints: of the run.
        newer_than: steps of the newest one that stays.
        copy_records: called with the new folder before a checkpoint is moved. If the process is
            killed in between, the next call finds the checkpoints and copies again.

    Returns:
        The new folder below `checkpoints/set-aside/`; None where there was nothing to move.
    """
    newer = [path for step, path in by_step(checkpoints).items() if step > newer_than]
    if not newer:
        return None
    base = checkpoints / _ASIDE / f"after-{newer_than:06d}"
    target, number = base, 1
    while target.exists():
        number += 1
        target = base.with_name(f"{base.name}.{number}")
    target.mkdir(parents=True)
    if copy_records is not None:
        copy_records(target)
    for path in newer:
        path.rename(target / path.name)
    return target


def prune(checkpoints: Path, keep: int, *, written: Path) -> None:
    """Remove old checkpoints after one was written, so that `keep` whole ones stay.

    The one just written stays, whatever else is there. One that is kept for its accuracy stays too
    and does not count (`trainer.checkpoint.format.files`). A damaged one (by its manifest
    and the sizes of its files) does not count and is not removed. One that cannot be removed stays.
    If the disk does not answer, all stay, and it is logged.
    """
    try:
        found = sorted(by_step(checkpoints).items())
        stays = spared(checkpoints)
        whole = [path for step, path in found if has_its_files(path) and not stays(step)]
    except OSError as error:
        logger.warning("old checkpoints in %s cannot be removed: %s", checkpoints, error)
        return
    others = [path for path in whole if path != written]
    for old in others[: max(0, len(others) - (keep - 1))]:
        hidden = old.with_name(f".{old.name}.{os.getpid()}.old")
        try:
            old.rename(hidden)
        except OSError:
            continue
        shutil.rmtree(hidden, ignore_errors=True)


def remove_remains(checkpoints: Path, *, unless: Path | None = None) -> None:
    """Remove what a killed writer left. Only the process that writes checkpoints may call this.

    `unless`: the one that is being written, where other ranks may have begun already.
    """
    for left in [*checkpoints.glob(".step-*.writing"), *checkpoints.glob(".step-*.old")]:
        if left != unless:
            shutil.rmtree(left, ignore_errors=True)


def _chosen(checkpoints: Path, step: int) -> ResumePoint:
    """The checkpoint that the user asked for."""
    directory = path_of(checkpoints, step)
    try:
        if not directory.is_dir():
            raise CheckpointError(f"there is no checkpoint of step {step} in {checkpoints}")
        return ResumePoint(directory, step, verified(directory))
    except CheckpointError as error:
        whole = ", ".join(str(at) for at, path in sorted(by_step(checkpoints).items()) if _ok(path))
        raise CheckpointError(f"{error}; whole checkpoints: {whole or 'none'}") from error


def _ok(directory: Path) -> bool:
    try:
        verified(directory)
    except CheckpointError:
        return False
    return True


def _from_weights(newest_first: list[Path]) -> str:
    """How to start from a damaged checkpoint's weights, if these are whole."""
    for directory in newest_first:
        try:
            verify_files(directory, read_manifest(directory), only=WEIGHTS)
        except CheckpointError:
            continue
        return f" from weights that are whole, under another name: --set model.path={directory}"
    return ""


def by_step(checkpoints: Path) -> dict[int, Path]:
    """Every folder with the name of a checkpoint, whole or not, by its step."""
    return {
        int(name[1]): path
        for path in checkpoints.glob("step-*")
        if (name := _NAME.fullmatch(path.name)) and path.is_dir()
    }
