"""Finds, chooses and removes checkpoints, without importing torch.

The controller chooses the checkpoint that a run or a restarted trainer continues from, and sends
the trainer its step. `trainer.checkpoint.checkpoint` writes and loads them.

    point = choose(run / "checkpoints")
    aside = set_aside(run / "checkpoints", newer_than=point.step)

The controller writes `checkpoints/best.json` (`evaluation.keep_best`), which pruning reads.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.jsonl import read_jsonl
from asyncrl.trainer.base.errors import CheckpointError, CheckpointUnwritable
from asyncrl.trainer.checkpoint.format.index import WEIGHTS
from asyncrl.trainer.checkpoint.format.manifest import (
    Manifest,
    has_its_files,
    read_manifest,
    verify_files,
)
from asyncrl.wire.messages.from_trainer import CheckpointFault
from asyncrl.wire.records.step import TrainedStep
from asyncrl.wire.transport.atomic_files import write_atomically

logger = logging.getLogger(__name__)

_CAUSES: dict[int, CheckpointFault] = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "quota",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
NAME = "best.json"
_NAME = re.compile(r"step-(\d{6,})")
_ASIDE = "set-aside"
STEPS = "steps.jsonl"
"""File of a checkpoint with a `TrainedStep` for each step since the previous checkpoint."""


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError (no space) if fewer than `needed` bytes are free in the folder."""
    free = _free(folder)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def unwritable(directory: Path, needed: int) -> Iterator[None]:
    """Turn disk errors in the block into CheckpointUnwritable; `needed` is the size in bytes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        text = os.strerror(number) if number else str(error)
        free = _free(directory.parent)
        raise CheckpointUnwritable(
            f"the checkpoint {directory} cannot be written: {text} ({needed} bytes needed, "
            f"{'unknown' if free is None else free} free)",
            _CAUSES.get(number, "io_error"),
        ) from error


def _number(error: OSError | SafetensorError) -> int:
    """Return the error number, or 0. Safetensors has it only in its message."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = _RUST_ERRNO.search(str(error))
    return int(found[1]) if found else 0


def _free(folder: Path) -> int | None:
    """Bytes that this process may still write to the folder's disk, if known."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of best.json."""

    every: int
    """`evaluation.every`: multiples of it are evaluated."""
    known: int
    """Up to this step, accuracies are known or will never be."""
    step: int | None = None
    accuracy: float | None = None
    of: str = ""
    """The evaluation set of this accuracy."""

    def spares(self, step: int) -> bool:
        """Return True if the step's checkpoint must stay: it is the best, or may turn out to be."""
        return step == self.step or (step > self.known and step % self.every == 0)


def write_best(checkpoints: Path, best: BestCheckpoint | None) -> None:
    """Replace best.json, or remove it. Raises OSError."""
    if best is None:
        (checkpoints / NAME).unlink(missing_ok=True)
    else:
        text = msgspec.json.format(msgspec.json.encode(best), indent=2).decode()
        write_atomically(checkpoints / NAME, text + "\n")


def spared(checkpoints: Path) -> Callable[[int], bool]:
    """Return a predicate: must a step's checkpoint stay? If best.json is unreadable, all must."""
    try:
        best = msgspec.json.decode((checkpoints / NAME).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return lambda _: False
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("no checkpoint is removed: %s: %s", checkpoints / NAME, error)
        return lambda _: True
    return best.spares


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a run continues from."""

    directory: Path | None = None
    """A verified checkpoint; None to start at the first step."""
    step: int = 0
    """Steps trained in this checkpoint; the next step to train has this index."""
    manifest: Manifest | None = None
    faults: tuple[str, ...] = ()
    """Path and defect of each newer checkpoint that cannot be used, newest first."""


def path_of(checkpoints: Path, step: int) -> Path:
    """Path of the checkpoint after this many steps."""
    return checkpoints / f"step-{step:06d}"


def choose(checkpoints: Path, step: int | None = None) -> ResumePoint:
    """Choose the newest intact checkpoint, or the one after `step` steps. Changes nothing.

    Every file of the chosen checkpoint and of damaged newer ones is read once. Raises
    CheckpointError, with a remedy, if all are damaged, or the requested one is damaged or absent.
    """
    if step is not None:
        return _chosen(checkpoints, step)
    found = by_step(checkpoints)
    faults: list[str] = []
    for at, directory in found.items():
        try:
            return ResumePoint(directory, at, verified(directory), tuple(faults))
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(
            f"none of the checkpoints in {checkpoints} is intact. " + ". ".join(faults) + ". "
            "Restore one of them from a copy, start the run again with --clean, or start a new "
            "run" + _from_weights(found.values())
        )
    return ResumePoint()


def newest_complete(checkpoints: Path) -> int | None:
    """Step of the newest checkpoint whose files all have their sizes, if any; reads no contents."""
    steps = by_step(checkpoints).items()
    return next((step for step, directory in steps if has_its_files(directory)), None)


def dtype_of(directory: Path) -> str | None:
    """Read `trainer.dtype` from a checkpoint's manifest, if it is there. Raises CheckpointError."""
    found = read_manifest(directory).settings.get("dtype")
    return found if isinstance(found, str) else None


def dtype_of_run(checkpoints: Path) -> str | None:
    """`trainer.dtype` of a run, by its newest readable manifest, if there is one."""
    for directory in by_step(checkpoints).values():
        with contextlib.suppress(CheckpointError):
            return dtype_of(directory)
    return None


def up_to(checkpoints: Path, step: int) -> list[Path]:
    """Checkpoints after at most this many steps, intact or damaged, newest first."""
    return [directory for at, directory in by_step(checkpoints).items() if at <= step]


def steps_of(directory: Path) -> list[TrainedStep]:
    """Read a checkpoint's records of the steps since the previous one. Raises CheckpointError."""
    verify_files(directory, read_manifest(directory), only=(STEPS,))
    try:
        return read_jsonl(directory / STEPS, TrainedStep)
    except FileNotFoundError:
        return []
    except (OSError, RecordError) as error:
        raise CheckpointError(f"{directory / STEPS} cannot be read: {error}") from error


def verified(directory: Path) -> Manifest:
    """Read a complete checkpoint once; return its manifest. Raises CheckpointError."""
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    name = _NAME.fullmatch(directory.name)
    if name is not None and int(name[1]) != manifest.policy_version:
        raise CheckpointError(
            f"{directory} holds step {manifest.policy_version} by its manifest: was it renamed?"
        )
    return manifest


def set_aside(
    checkpoints: Path, *, newer_than: int, copy_records: Callable[[Path], None] | None = None
) -> Path | None:
    """Move every checkpoint after this many steps, intact or damaged, to `checkpoints/set-aside/`.

    They belong to another course of the run than the one that continues, which will reuse their
    names. Nothing is removed. `copy_records` is called with the new folder before a checkpoint is
    moved; if the process is killed in between, the next call copies again. Returns the new folder.
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
    """Remove old checkpoints after one was written, so that `keep` intact ones stay.

    The one just written always stays. One that is kept for its accuracy stays and does not count;
    neither does a damaged one (by its manifest and file sizes). One that cannot be removed stays.
    If the disk fails, all stay, and a warning is logged.
    """
    try:
        found = by_step(checkpoints)
        stays = spared(checkpoints)
        whole = [one for at, one in found.items() if has_its_files(one) and not stays(at)]
    except OSError as error:
        logger.warning("old checkpoints in %s cannot be removed: %s", checkpoints, error)
        return
    others = [path for path in whole if path != written]
    for old in reversed(others[keep - 1 :]):
        hidden = old.with_name(f".{old.name}.{os.getpid()}.old")
        with contextlib.suppress(OSError):
            old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def remove_remains(checkpoints: Path, *, unless: Path | None = None) -> None:
    """Remove a killed writer's leftovers, except `unless`, which other ranks may have begun.

    Only the process that writes checkpoints may call this.
    """
    for left in [*checkpoints.glob(".step-*.writing"), *checkpoints.glob(".step-*.old")]:
        if left != unless:
            shutil.rmtree(left, ignore_errors=True)


def _chosen(checkpoints: Path, step: int) -> ResumePoint:
    directory = path_of(checkpoints, step)
    try:
        if not directory.is_dir():
            raise CheckpointError(f"there is no checkpoint of step {step} in {checkpoints}")
        return ResumePoint(directory, step, verified(directory))
    except CheckpointError as error:
        whole = ", ".join(str(at) for at, path in sorted(by_step(checkpoints).items()) if _ok(path))
        raise CheckpointError(f"{error}; intact checkpoints: {whole or 'none'}") from error


def _ok(directory: Path) -> bool:
    try:
        verified(directory)
    except CheckpointError:
        return False
    return True


def _from_weights(newest_first: Iterable[Path]) -> str:
    """Describe how to start from a damaged checkpoint's weights, if these are intact."""
    for directory in newest_first:
        try:
            verify_files(directory, read_manifest(directory), only=WEIGHTS)
        except CheckpointError:
            continue
        return f" from weights that are intact, under another name: --set model.path={directory}"
    return ""


def by_step(checkpoints: Path) -> dict[int, Path]:
    """Every folder with the name of a checkpoint, intact or not, by its step, newest first."""
    named = [(_NAME.fullmatch(path.name), path) for path in checkpoints.glob("step-*")]
    found = [(int(name[1]), path) for name, path in named if name and path.is_dir()]
    return dict(sorted(found, reverse=True))
