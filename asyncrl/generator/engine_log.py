"""The log of a generator's engine, `RUN/engine/NAME.jsonl`: one line per report.

The simulator fits its cost model to these lines (docs/modes.md). Counters grow within one process;
those of a replaced generator restart at 0.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter
from asyncrl.wire.messages.from_generator import GeneratorReport
from asyncrl.wire.records.step import EngineStats


class EngineRecord(msgspec.Struct, frozen=True):
    """One line of the log."""

    time: float
    """Unix seconds."""
    engine: EngineStats
    rewards_waiting: int = 0
    lengths: list[int] = []
    """Response lengths of the samples finished since the previous line."""


class EngineLog:
    """Writes the log. Used by one event loop."""

    def __init__(self, path: Path) -> None:
        self._writer = RetryingJsonlWriter[EngineRecord](path)
        self._lengths: list[int] = []

    def add_length(self, length: int) -> None:
        """Add the length of a finished sample to the next line."""
        self._lengths.append(length)

    def append(self, report: GeneratorReport) -> None:
        """Write a line with the counters of this report."""
        now = time.time()  # noqa: TID251 - for its record
        record = EngineRecord(now, report.engine, report.rewards_waiting, self._lengths)
        self._writer.append(record)
        self._lengths = []

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()
