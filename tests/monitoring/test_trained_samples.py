"""The files of the sample log: rotation, the limit, and truncation when steps are repeated."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from monitoring.samples import SampleSegment
from monitoring.trained_samples import (
    SampleFiles,
    TrainedSample,
    read_trained_samples,
    sample_files,
    truncate,
)


def record(step: int, sample: int = 0, *, response: str = "é\n") -> TrainedSample:
    return TrainedSample(
        step=step, group=step, sample=sample, prompt_id="p", prompt="1+1=", response=response,
        reward=0.5, finish_reason="stop", generator="g0", prompt_length=4, response_length=2,
        segments=[SampleSegment(step, 0, 2)], sampled=1, drafted=1, verified=0,
    )  # fmt: skip


def written(folder: Path, *, steps: int = 40, limit_bytes: int = 1 << 30) -> None:
    files = SampleFiles(folder, limit_bytes=limit_bytes)
    for step in range(steps):
        files.append([record(step, 0), record(step, 1)])
    files.close()


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
