"""What a generator's engine did, in `RUN/engine/NAME.jsonl`: a line for each of its reports.

The simulator fits its cost model to these lines (docs/simulation.md). Counters only grow within one
process; a generator that was started again begins at 0.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from monitoring.jsonl import JsonlWriter
from wire.messages.from_generator import GeneratorReport
from wire.records import EngineStats


class EngineRecord(msgspec.Struct, frozen=True):
    """The state at one moment."""

    time: float
    """Seconds since 1970."""
    engine: EngineStats
    """As in `GeneratorReport`."""
    rewards_waiting: int = 0
    """Samples whose reward is not computed yet."""
    lengths: list[int] = []
    """Response lengths of the samples that were finished since the line before."""


class EngineLog:
    """Writes the lines. Used by one event loop."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)
        self._lengths: list[int] = []

    def finished(self, length: int) -> None:
        """A sample has ended with so many tokens."""
        self._lengths.append(length)

    def note(self, report: GeneratorReport) -> None:
        """Write a line."""
        self._writer.append(
            [EngineRecord(time.time(), report.engine, report.rewards_waiting, self._lengths)]
        )
        self._lengths = []

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()
