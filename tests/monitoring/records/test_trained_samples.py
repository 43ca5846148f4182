"""The files of the sample log: rotation, the limit, and truncation when steps are repeated."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from sample_records import record, written

from asyncrl.monitoring.records.trained_samples import (
    SampleFiles,
    copy_later,
    newest_trained,
    read_trained_samples,
    sample_files,
    truncate,
)


def steps_of(folder: Path) -> list[int]:
    return [one.step for one in read_trained_samples(folder)]


def test_records_come_back_in_order_and_the_oldest_file_goes_at_the_limit(tmp_path: Path) -> None:
    written(tmp_path / "all")
    assert steps_of(tmp_path / "all") == [step for step in range(40) for _ in range(2)]
    assert next(read_trained_samples(tmp_path / "all")) == record(0)
    limit = 8000
    written(tmp_path / "some", limit_bytes=limit)
    files = sample_files(tmp_path / "some")
    assert files[0].name != "000001.jsonl", "the oldest files were to be removed"
    assert sum(file.stat().st_size for file in files) <= limit + limit // 8
    steps = steps_of(tmp_path / "some")
    assert steps[-1] == 39
    assert steps == sorted(steps)
    assert len(steps) == 2 * (40 - steps[0])


@pytest.mark.parametrize("before_step", [0, 1, 17, 39, 40])
def test_steps_that_are_repeated_are_dropped_and_written_again(
    tmp_path: Path, before_step: int
) -> None:
    written(tmp_path, limit_bytes=16_000)
    kept = [step for step in steps_of(tmp_path) if step < before_step]
    with sample_files(tmp_path)[-1].open("ab") as file:
        file.write(b'{"step":40,"gro')  # the trainer was killed while it wrote this
    truncate(tmp_path, before_step=before_step)
    assert steps_of(tmp_path) == kept
    files = SampleFiles(tmp_path, limit_bytes=1 << 30)
    files.append([record(before_step)])
    files.close()
    assert steps_of(tmp_path) == [*kept, before_step]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_after_a_full_disk_records_follow_the_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SampleFiles(tmp_path, limit_bytes=1 << 30)
    files.append([record(0)])
    writer: Any = files._writer
    half = writer._file

    class FullDisk:
        def write(self, data: bytes) -> None:
            half.write(data[: len(data) // 2])
            half.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            half.close()

    monkeypatch.setattr(writer, "_file", FullDisk())
    with pytest.raises(OSError, match="No space left"):
        files.append([record(1)])
    files.append([record(2)])
    files.close()
    assert steps_of(tmp_path) == [0, 2]


def test_steps_before_an_empty_newest_file_are_dropped_too(tmp_path: Path) -> None:
    """The next file is opened as soon as one is full."""
    files, step = SampleFiles(tmp_path, limit_bytes=16_000), 0
    while len(sample_files(tmp_path)) < 3:
        files.append([record(step)])
        step += 1
    files.close()
    assert sample_files(tmp_path)[-1].stat().st_size == 0
    truncate(tmp_path, before_step=2)
    assert steps_of(tmp_path) == [0, 1]
    files.append([record(2)])
    files.close()
    assert steps_of(tmp_path) == [0, 1, 2]


def test_files_are_cut_in_place_and_copied_ones_stay_whole(tmp_path: Path) -> None:
    log, aside = tmp_path / "log", tmp_path / "aside"
    written(log, limit_bytes=16_000)
    files = sample_files(log)
    last = 21
    inodes = {path.name: path.stat().st_ino for path in files}
    before = {path.name: path.read_bytes() for path in files}
    copy_later(log, aside, from_step=last)
    truncate(log, before_step=last)
    left = sample_files(log)
    assert 1 < len(left) < len(files)
    assert all(path.stat().st_ino == inodes[path.name] for path in left)
    writer = SampleFiles(log, limit_bytes=1 << 30)
    writer.append([record(last)])
    writer.close()
    copied = sample_files(aside)
    assert {path.name for path in copied} >= inodes.keys() - {path.name for path in left}
    assert all(path.read_bytes() == before[path.name] for path in copied)
    assert set(range(last, 40)) <= set(steps_of(aside))
    assert any(path.stat().st_ino == inodes[path.name] for path in copied), "no file was linked"


def test_a_damaged_line_does_not_hide_the_steps_before_it(tmp_path: Path) -> None:
    written(tmp_path, steps=3)
    with sample_files(tmp_path)[-1].open("ab") as file:
        file.write(b"\0\xff\n")
    truncate(tmp_path, before_step=3)
    assert steps_of(tmp_path) == [0, 0, 1, 1, 2, 2]


def test_the_samples_of_several_ranks_are_one_log(tmp_path: Path) -> None:
    for rank in (0, 1):
        files = SampleFiles(tmp_path, limit_bytes=1 << 30, rank=rank)
        for step in range(6):
            if step % 3 != rank:  # neither rank has samples of every step
                files.append([record(step)])
        files.close()
    assert steps_of(tmp_path) == [0, 1, 2, 2, 3, 4, 5, 5]
    lines = b"".join(path.read_bytes() for path in tmp_path.glob("*.jsonl")).splitlines()
    assert len(lines) == 8, "one folder has all"
    assert [one.step for one in newest_trained(tmp_path, 3)] == [4, 5, 5]
    copy_later(tmp_path, tmp_path / "kept", from_step=3)
    truncate(tmp_path, before_step=3)
    assert steps_of(tmp_path) == [0, 1, 2, 2]
    assert len(sample_files(tmp_path, 1)) == 1
    assert steps_of(tmp_path / "kept") == [0, 1, 2, 2, 3, 4, 5, 5]
