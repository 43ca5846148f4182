"""Which checkpoint a run continues from, whatever happened to the newer ones."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from whole_checkpoints import TRAINING, WEIGHTS, flip, truncate, write_whole

from asyncrl.rollout.truncation import Truncation
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format import files as checkpoint_files
from asyncrl.trainer.checkpoint.format.files import (
    choose,
    path_of,
    prune,
    remove_remains,
    set_aside,
)
from asyncrl.trainer.checkpoint.format.manifest import (
    FORMAT,
    FileDigest,
    Manifest,
    check_settings,
    read_manifest,
    settings_of,
)

MANIFEST = "manifest.json"

UNREAD = ("note.md", "model/.nfs0001", "model/README.md", "state/rank-7.safetensors")
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda at: truncate(at / WEIGHTS), r"00001\.safetensors is truncated: \d+ of \d"),
    "empty": (lambda at: (at / WEIGHTS).write_bytes(b""), r"is truncated: 0 of \d+ bytes"),
    "longer": (lambda at: (at / WEIGHTS).write_bytes(b"7" * 9999), r"9999 bytes instead of \d+"),
    "changed": (lambda at: flip(at / WEIGHTS), r"do not match the digest"),
    "missing": (lambda at: (at / WEIGHTS).unlink(), r"00001\.safetensors is missing"),
    "a folder": (
        lambda at: ((at / WEIGHTS).unlink(), (at / WEIGHTS).mkdir()),
        r"00001\.safetensors is missing",
    ),
    "added": (
        lambda at: (at / "model" / "pytorch_model.bin").write_bytes(b"payload"),
        r"pytorch_model\.bin was added later",
    ),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), r"has no manifest\.json"),
    "empty manifest": (lambda at: (at / MANIFEST).write_bytes(b""), r"manifest\.json is damaged"),
    "half a manifest": (lambda at: truncate(at / MANIFEST), r"manifest\.json is damaged"),
    "not UTF-8": (
        lambda at: (at / MANIFEST).write_bytes(b'{"format": 3, "x": "\xff"}'),
        r"manifest\.json is damaged",
    ),
    "deep": (
        lambda at: (at / MANIFEST).write_bytes(b'{"format": 3, "x": ' + b"[" * 100_000),
        r"manifest\.json is damaged",
    ),
    "without a key": (
        lambda at: (at / MANIFEST).write_text(json.dumps({"format": 3, "policy_version": 3})),
        r"missing required field",
    ),
    "other numbers": (
        lambda at: (at / MANIFEST).write_text(
            (at / MANIFEST).read_text().replace('"policy_version": 3', '"policy_version": 4')
        ),
        r"its contents do not match their digest",
    ),
    "format 1": (
        lambda at: ((at / MANIFEST).unlink(), (at / "state.json").write_text("{}")),
        r"has checkpoint format 1, but this version reads only format 3; .*--set model\.path=",
    ),
    "format 2": (
        lambda at: (at / MANIFEST).write_text('{"format": 2}'),
        r"has checkpoint format 2, but this version reads only format 3; .*--set model\.path=",
    ),
    "format 99": (
        lambda at: (at / MANIFEST).write_text('{"format": 99}'),
        r"has checkpoint format 99",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(kind: str, tmp_path: Path) -> None:
    _, older, newest = write_whole(tmp_path, 1, 2, 3)
    damage, says = DAMAGE[kind]
    damage(newest)
    point = choose(tmp_path)
    assert (point.directory, point.step) == (older, 2)
    (fault,) = point.faults
    assert str(newest) in fault
    assert re.search(says, fault)
    assert "\n" not in fault


def test_the_newest_whole_one_is_chosen_without_reading_older_ones(tmp_path: Path) -> None:
    assert choose(tmp_path / "absent").directory is None
    older, newest = write_whole(tmp_path, 9, 1_000_010)
    flip(older / WEIGHTS)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-9999999").write_text("a file of that name")
    point = choose(tmp_path)
    assert (point.directory, point.step, point.faults) == (newest, 1_000_010, ())


def test_added_files_that_nothing_reads_are_no_damage(tmp_path: Path) -> None:
    (only,) = write_whole(tmp_path, 4)
    for name in UNREAD:
        (only / name).write_bytes(b"payload")
    assert choose(tmp_path).step == 4


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    (only,) = write_whole(tmp_path, 4)
    only.rename(path_of(tmp_path, 40))
    with pytest.raises(CheckpointError, match=r"step-000040 holds step 4 by its manifest"):
        choose(tmp_path)


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    (at,) = write_whole(tmp_path, 4)
    (tmp_path / "outside").write_text("secret")
    text = (at / MANIFEST).read_text().replace("state/index.json", "../outside")
    (at / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"do not match their digest"):
        choose(tmp_path)


def test_where_none_is_whole_each_is_named_with_its_fault_and_what_can_be_done(
    tmp_path: Path,
) -> None:
    first, second = write_whole(tmp_path, 1, 2)
    truncate(first / WEIGHTS)
    truncate(second / TRAINING)
    with pytest.raises(CheckpointError) as caught:
        choose(tmp_path)
    text = str(caught.value)
    assert text.index(str(second)) < text.index(str(first))
    assert "--clean" in text
    assert f"--set model.path={second}" in text, "its weights are whole"


def test_the_step_asked_for_is_taken_or_the_whole_ones_are_listed(tmp_path: Path) -> None:
    write_whole(tmp_path, 10, 20, 30, 40)
    assert choose(tmp_path, 20).step == 20
    flip(path_of(tmp_path, 20) / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"digest.*intact checkpoints: 10, 30, 40$"):
        choose(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 25.*: 10, 30, 40$"):
        choose(tmp_path, 25)


def test_newer_checkpoints_are_moved_aside_and_none_is_lost(tmp_path: Path) -> None:
    write_whole(tmp_path, 1, 2, 3)
    assert set_aside(tmp_path, newer_than=3) is None
    first = set_aside(tmp_path, newer_than=1)
    assert first == tmp_path / "set-aside" / "after-000001"
    assert sorted(path.name for path in first.iterdir()) == ["step-000002", "step-000003"]
    assert choose(tmp_path).step == 1
    write_whole(tmp_path, 2)
    second = set_aside(tmp_path, newer_than=1)
    assert second == tmp_path / "set-aside" / "after-000001.2"


def test_pruning_counts_only_whole_ones_and_keeps_the_one_just_written(tmp_path: Path) -> None:
    write_whole(tmp_path, 1, 2, 3, 4, 5)
    truncate(path_of(tmp_path, 4) / WEIGHTS)
    truncate(path_of(tmp_path, 5) / WEIGHTS)
    prune(tmp_path, 2, written=path_of(tmp_path, 3))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-000002", "step-000003", "step-000004", "step-000005"]
    assert choose(tmp_path).step == 3
    prune(tmp_path, 1, written=path_of(tmp_path, 3))
    assert choose(tmp_path).step == 3
    prune(tmp_path, 9, written=path_of(tmp_path, 3))
    assert path_of(tmp_path, 3).exists()


def test_a_checkpoint_that_cannot_be_examined_does_not_stop_pruning(tmp_path: Path) -> None:
    write_whole(tmp_path, 1, 2, 4)
    (unreadable,) = write_whole(tmp_path, 3)
    long = "x" * 300  # longer than a file's name can be
    whole = read_manifest(unreadable)
    files = {long: FileDigest(1, "")}
    changed = msgspec.structs.replace(whole, files=files, sha256="")
    digest = hashlib.sha256(msgspec.json.encode(changed)).hexdigest()
    changed = msgspec.structs.replace(changed, sha256=digest)
    (unreadable / MANIFEST).write_bytes(msgspec.json.encode(changed))
    prune(tmp_path, 2, written=path_of(tmp_path, 4))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-000002", "step-000003", "step-000004"]


def test_a_disk_that_does_not_answer_ends_pruning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Injected: it cannot be had here."""

    def refuse(_: Path) -> dict[int, Path]:
        raise OSError(errno.EIO, "as injected")

    write_whole(tmp_path, 1, 2)
    monkeypatch.setattr(checkpoint_files, "by_step", refuse)
    prune(tmp_path, 1, written=path_of(tmp_path, 2))
    assert "as injected" in caplog.text
    assert path_of(tmp_path, 1).exists()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    write_whole(tmp_path, 1)
    for name in (".step-000003.77.writing", ".step-000001.77.old"):
        (tmp_path / name).mkdir()
    remove_remains(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("seed", 2, "seed: 1 -> 2"),
        ("group_size", 4, "group_size: 2 -> 4"),
    ],
)
def test_a_run_of_another_seed_or_group_size_is_another_run(
    name: str, value: object, said: str
) -> None:
    asked: dict[str, Any] = {
        "group_size": 2, "seed": 1, "temperature": 1.0, "truncation": Truncation(),
    }  # fmt: skip
    written = settings_of(TrainerConfig(), **asked)
    manifest = Manifest(format=FORMAT, policy_version=1, settings=written, files={})
    check_settings(Path("step-000001"), manifest, written)
    sampled = {"temperature": 0.5, "truncation": Truncation(top_p=0.9, top_k=5, min_p=0.1)}
    check_settings(
        Path("step-000001"), manifest, settings_of(TrainerConfig(), **{**asked, **sampled})
    )
    changed = settings_of(TrainerConfig(), **{**asked, name: value})
    with pytest.raises(CheckpointError, match=re.escape(f"other settings ({said})")):
        check_settings(Path("step-000001"), manifest, changed)


def test_a_type_that_the_trainer_will_choose_is_compared_by_the_trainer() -> None:
    """The controller of a run on other machines has `auto`, the checkpoint what it was there."""
    asked: dict[str, Any] = {
        "group_size": 2, "seed": 1, "temperature": 1.0, "truncation": Truncation(),
    }  # fmt: skip
    written = settings_of(TrainerConfig(dtype="bfloat16"), **asked)
    manifest = Manifest(format=FORMAT, policy_version=1, settings=written, files={})
    check_settings(Path("step-000001"), manifest, settings_of(TrainerConfig(), **asked))
    resolved = settings_of(TrainerConfig().for_device(None), **asked)
    with pytest.raises(CheckpointError, match="dtype: 'bfloat16' -> 'float32'"):
        check_settings(Path("step-000001"), manifest, resolved)
