"""Readers and writers of `metrics.jsonl` and `evaluations.jsonl`.

A resumed run appends the steps that it trains again. Readers take the newest record of each step.
"""

from collections.abc import Iterable
from pathlib import Path

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter, read_jsonl, read_tail
from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import StepMetrics

EvaluationsLog = RetryingJsonlWriter[EvaluationRecord]
MetricsLog = RetryingJsonlWriter[StepMetrics]


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """The newest record of each step, in order; empty without the file. Raises RecordError."""
    return _newest_of_each_step(read_jsonl(path, EvaluationRecord, missing_ok=True))


def recent_evaluations(path: Path, most_bytes: int) -> list[EvaluationRecord]:
    """The same of the file's end, while it grows."""
    return _newest_of_each_step(read_tail(path, EvaluationRecord, most_bytes))


def _newest_of_each_step(records: Iterable[EvaluationRecord]) -> list[EvaluationRecord]:
    newest = {one.step: one for one in records}
    return [newest[step] for step in sorted(newest)]


def read_metrics(path: Path) -> list[StepMetrics]:
    """The newest record of each step, in order; empty without the file. Raises RecordError."""
    return drop_superseded(read_jsonl(path, StepMetrics, missing_ok=True))


def drop_superseded(steps: Iterable[StepMetrics]) -> list[StepMetrics]:
    """Drop each record that is followed by one of the same step or an earlier one."""
    kept: list[StepMetrics] = []
    for one in steps:
        while kept and kept[-1].step >= one.step:
            kept.pop()
        kept.append(one)
    return kept
