"""`metrics.jsonl`: one `StepMetrics` a line, readable during the run.

A resumed run trains the steps after its last checkpoint again, and appends them. Readers take the
newest record of each step and drop what it superseded:

    >>> steps = [StepMetrics(step=0, time=1.0), StepMetrics(step=1, time=2.0)]
    >>> resumed = StepMetrics(step=1, time=9.0)
    >>> [one.time for one in drop_superseded([*steps, resumed])]
    [1.0, 9.0]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import StepMetrics


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
    """The newest record of each step, in order; empty without the file. Raises RecordError."""
    try:
        records = read_jsonl(path, EvaluationRecord)
    except FileNotFoundError:
        return []
    newest = {one.step: one for one in records}
    return [newest[step] for step in sorted(newest)]


class MetricsLog:
    """Appends a line per step to `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = RetryingJsonlWriter(path)

    def append(self, step: StepMetrics) -> None:
        """Write one step's record."""
        self._writer.append([step])

    def flush(self) -> bool:
        """Try to write waiting lines; return True if none is left."""
        return self._writer.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The newest record of each step, in order; empty without the file. Raises RecordError."""
    try:
        steps = read_jsonl(path, StepMetrics)
    except FileNotFoundError:
        return []
    return drop_superseded(steps)


def drop_superseded(steps: Iterable[StepMetrics]) -> list[StepMetrics]:
    """Drop each record that is followed by one of the same step or an earlier one."""
    kept: list[StepMetrics] = []
    for one in steps:
        while kept and kept[-1].step >= one.step:
            kept.pop()
        kept.append(one)
    return kept
