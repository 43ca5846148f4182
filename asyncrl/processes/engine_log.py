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


class EngineRecord(msgspec.Struct, frozen=True):
    """The state at one moment; counters as in `GeneratorReport`."""

    time: float
    """Seconds since 1970."""
    steps: int
    busy_seconds: float
    tokens_generated: int
    tokens_drafted: int
    tokens_accepted: int
    tokens_verified: int
    tokens_rejected: int
    running: int = 0
    waiting: int = 0
    slots: int = 0
    policy_version: int = 0
    rewards_waiting: int = 0
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
        values = {
            name: getattr(report, name)
            for name in EngineRecord.__struct_fields__
            if name not in ("time", "lengths")
        }
        self._writer.append([EngineRecord(time=time.time(), lengths=self._lengths, **values)])
        self._lengths = []

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()
