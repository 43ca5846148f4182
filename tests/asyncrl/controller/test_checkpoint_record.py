"""What a user is told about checkpoints that fail."""

from __future__ import annotations

from pathlib import Path

from whole_checkpoints import WEIGHTS, truncate, write_whole

from asyncrl.controller.inbox import CheckpointRecord
from asyncrl.wire.messages.from_trainer import CheckpointFailed, CheckpointWritten


def failed(version: int, cause: str = "disk_full") -> CheckpointFailed:
    reason = f"the checkpoint step-{version} cannot be written: {cause} (9 bytes needed, 1 free)"
    return CheckpointFailed(version, cause, reason, version + 1)


def test_each_cause_is_said_once_and_so_is_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    write_whole(tmp_path, 1)
    record = CheckpointRecord(tmp_path, said.append)
    record.written(CheckpointWritten(1, "step-000001"))
    assert said == []
    for version in (2, 3, 4):
        record.failed(failed(version))
    (first,) = said
    assert "9 bytes needed, 1 free). Training continues; the next attempt is after step 3" in first
    assert "or at the end of the run" in first
    assert first.endswith("the newest checkpoint is that of step 1")
    record.failed(failed(5, "read_only"))
    assert len(said) == 2
    record.written(CheckpointWritten(6, "step-000006"))
    assert said[2] == "checkpoints can be written now: step-000006"


def test_the_last_state_is_missing_unless_it_is_on_the_disk(tmp_path: Path) -> None:
    record = CheckpointRecord(tmp_path, lambda _: None)
    assert record.missing(0) is None
    assert "step 3, is not saved: the trainer ended" in (record.missing(3) or "")
    assert "there is no checkpoint yet" in (record.missing(3) or "")
    assert "continue from the first step with --resume" in (record.missing(3) or "")
    write_whole(tmp_path, 2)
    assert "the newest checkpoint is that of step 2" in (record.missing(3) or "")
    assert "continue from there with --resume" in (record.missing(3) or "")
    (saved,) = write_whole(tmp_path, 3)
    assert record.missing(3) is None
    truncate(saved / WEIGHTS)
    record.failed(failed(3))
    assert "9 bytes needed, 1 free" in (record.missing(3) or "")
