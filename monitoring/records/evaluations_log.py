"""`evaluations.jsonl`: one `EvaluationRecord` a line, readable during the run."""

from __future__ import annotations

from pathlib import Path

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl
from asyncrl.wire.records.evaluations import EvaluationRecord


class EvaluationsLog:
    """Appends a line per evaluation to `path`."""

    def __init__(self, path: Path) -> None:
        self._writer = RetryingJsonlWriter(path)

    def append(self, record: EvaluationRecord) -> None:
        """Write one result."""
        self._writer.append([record])

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """The newest record of each step, in order of the steps; empty without the file.

    Raises:
        RecordError: a line other than an incomplete last one cannot be decoded.
    """
    try:
        records = read_jsonl(path, EvaluationRecord)
    except FileNotFoundError:
        return []
    newest = {one.step: one for one in records}
    return [newest[step] for step in sorted(newest)]
