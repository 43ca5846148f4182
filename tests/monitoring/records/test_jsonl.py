"""Records on a disk that is full: kept, written later, and never torn."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from small_disks import SmallDisk, small_disk

from asyncrl.monitoring.records import jsonl
from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl, read_undamaged


class Line(msgspec.Struct):
    number: int
    text: str = "x" * 1000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "64k") as mounted:
        yield mounted


def numbers(path: Path) -> list[int]:
    return [line.number for line in read_jsonl(path, Line)]


def test_lines_that_a_full_disk_did_not_take_are_written_when_there_is_room(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk.path / "metrics.jsonl"
    with closing(RetryingJsonlWriter(path)) as writer:
        writer.append(Line(0))
        disk.fill(leave=2_500)
        with caplog.at_level(logging.WARNING):
            for number in range(1, 30):
                writer.append(Line(number))
        whole = numbers(path)
        assert 1 <= len(whole) < 30
        assert len(caplog.records) == 1
        assert f"cannot write {path}: No space left" in caplog.text
        disk.free()
        writer.append(Line(30))
        assert numbers(path) == list(range(31))
        assert "can be written now; 0 lines are lost" in caplog.text
    assert len(caplog.records) == 2


def test_a_writer_keeps_a_bounded_number_of_lines_and_says_what_is_lost(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk.path / "metrics.jsonl"
    disk.fill(leave=0)
    writer = RetryingJsonlWriter(path, keep_bytes=5_000)
    for number in range(20):
        writer.append(Line(number))
    assert writer.dropped == 16
    writer.close()
    assert "20 lines of" in caplog.text
    with pytest.raises(ValueError, match="is closed"):
        writer.append(Line(0))


def test_a_file_that_cannot_be_opened_yet_is_opened_later(disk: SmallDisk) -> None:
    path = disk.path / "timeline" / "trainer.jsonl"
    disk.remount("ro")
    with closing(RetryingJsonlWriter(path)) as writer:
        writer.append(Line(0))
        disk.remount("rw")
        writer.append(Line(1))
    assert numbers(path) == [0, 1]


def test_a_disk_that_hangs_is_waited_for_once_and_gets_its_lines_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers, asked = tmp_path / "timeline.jsonl", threading.Event(), threading.Event()

    def hang(_: Path) -> None:
        asked.set()
        answers.wait(60)

    monkeypatch.setattr(jsonl, "_remove_incomplete_line", hang)
    began = time.monotonic()
    writer = RetryingJsonlWriter(path, patience_seconds=0.2)
    for number in range(100):
        writer.append(Line(number))
    assert asked.is_set()
    assert not writer.flush()
    assert time.monotonic() - began < 30, "it waited for the disk"
    assert f"cannot write {path}: no answer from the disk for 0.2 s" in caplog.text
    assert len(caplog.records) == 1
    answers.set()
    deadline = time.monotonic() + 60
    while not writer.flush():
        assert time.monotonic() < deadline
    writer.append(Line(100))
    writer.close()
    assert numbers(path) == list(range(101))
    assert "can be written now; 0 lines are lost" in caplog.text


def test_a_disk_that_never_answers_does_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())  # other tests may have left disks that hang
    never = threading.Event()
    monkeypatch.setattr(jsonl, "_remove_incomplete_line", lambda _: never.wait(60))
    writer = RetryingJsonlWriter(tmp_path / "timeline.jsonl", patience_seconds=0.1)
    writer.append(Line(0))
    writer.close()
    assert "1 lines of" in caplog.text
    never.set()
    for one in set(threading.enumerate()) - before:
        one.join(60)


class Growing(io.RawIOBase):
    """A file in which each read finds what its writer has written by then."""

    def __init__(self, *parts: bytes) -> None:
        super().__init__()
        self.parts = list(parts)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        part = self.parts.pop(0) if self.parts else b""
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("half", [b'{"number":1,"te', b'{"number":1}', b" ", b"\xff"])
def test_reading_ends_at_a_line_whose_writer_has_not_come_to_its_end(
    half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the line comes when the reader has already seen the end of the file."""
    first, nothing_yet, rest = b'{"number":0}\n', b"", b'xt":""}\n{"number":2}\n'

    def grown(*_: object) -> io.BufferedReader:
        return io.BufferedReader(Growing(first + half, nothing_yet, rest))

    monkeypatch.setattr(Path, "open", grown)
    assert numbers(Path("metrics.jsonl")) == [0]
    assert read_undamaged(Path("metrics.jsonl"), Line) == ([Line(0)], [])
