"""Checkpoints on disks that do not take them: real ones where that can be had."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_disks import SmallDisk, small_disk

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.checkpoint import checkpoint
from asyncrl.trainer.checkpoint.format.files import choose, path_of
from asyncrl.trainer.learner import Learner

ModelPath = Callable[[str], str]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "4m") as mounted:
        yield mounted


def _learner(model_path: ModelPath) -> Learner:
    config = TrainerConfig(device="cpu", keep_checkpoints=5)
    return Learner(config, model_path("qwen3"), group_size=4, seed=1)


def _save(learner: Learner, checkpoints: Path) -> None:
    learner.save(path_of(checkpoints, learner.policy_version))


def _refused(learner: Learner, checkpoints: Path, cause: str) -> str:
    with pytest.raises(CheckpointUnwritable) as caught:
        _save(learner, checkpoints)
    assert caught.value.cause == cause
    return str(caught.value)


@pytest.mark.parametrize("checked_before", [True, False], ids=["size known", "found by writing"])
def test_a_full_disk_keeps_the_last_checkpoint_and_takes_the_next_when_there_is_room(
    checked_before: bool, disk: SmallDisk, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, checkpoints = _learner(model_path), disk.path / "checkpoints"
    _save(learner, checkpoints)
    learner.step()
    disk.fill(leave=40_000)
    if not checked_before:
        monkeypatch.setattr(checkpoint, "check_space", lambda *_: None)
    said = _refused(learner, checkpoints, "disk_full")
    assert f"{path_of(checkpoints, 1)} cannot be written: No space left on device (" in said
    needed, free = (int(word) for word in said.replace("(", " ").split() if word.isdigit())
    assert needed > 60_000 > free > 20_000, "what the failed attempt took is free again"
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000"]
    assert choose(checkpoints).step == 0
    disk.free()
    _save(learner, checkpoints)
    assert choose(checkpoints).step == 1


@pytest.mark.parametrize("copied", [True, False])
def test_a_checkpoint_that_was_given_up_never_gets_its_name(
    *, copied: bool, tmp_path: Path, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hung, and training went on before it answered."""
    learner = _learner(model_path)
    _save(learner, tmp_path)
    learner.step()
    given_up = threading.Event()
    monkeypatch.setattr(checkpoint, "sync", lambda _: given_up.set())
    with pytest.raises(CheckpointUnwritable):
        learner.write(learner.pending(copied=copied), path_of(tmp_path, 1), (), given_up)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000"]
    assert choose(tmp_path).step == 0


def test_a_read_only_disk_is_said_to_be_one(disk: SmallDisk, model_path: ModelPath) -> None:
    learner, checkpoints = _learner(model_path), disk.path / "checkpoints"
    _save(learner, checkpoints)
    learner.step()
    disk.remount("ro")
    assert "Read-only file system" in _refused(learner, checkpoints, "read_only")
    disk.remount("rw")
    _save(learner, checkpoints)
    assert choose(checkpoints).step == 1


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.EDQUOT, "quota"), (errno.EIO, "io_error"), (0, "io_error")]
)
def test_a_quota_and_a_disk_at_fault_are_told_apart(
    number: int,
    cause: str,
    model_path: ModelPath,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Injected: neither can be had here."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "as injected")

    monkeypatch.setattr(checkpoint, "write_manifest", refuse)
    _refused(_learner(model_path), tmp_path, cause)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_makes_room_before_the_next_attempt(
    disk: SmallDisk, model_path: ModelPath
) -> None:
    learner, checkpoints = _learner(model_path), disk.path / "checkpoints"
    left = checkpoints / ".step-000003.77.writing"
    left.mkdir(parents=True)
    disk.fill(leave=0)
    (disk.path / "filler").rename(left / "model.safetensors")
    _save(learner, checkpoints)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000"]
