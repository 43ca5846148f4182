"""How fast each generator is, measured from its reports."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.wire.records.step import EngineStats

ROW_SECONDS = 40.0
"""Row-seconds over which a speed is averaged: 5 s of 8 running samples (of as many as there are
slots, if these are fewer)."""


@dataclass(slots=True)
class _Generator:
    stats: EngineStats
    reported: float
    tokens: int = 0
    row_seconds: float = 0.0
    is_warm: bool = False


class SpeedMeter:
    """Tokens per second for each running sample, by generator.

    The scheduler smooths them (`asyncrl.scheduler.speeds`). Time in which a generator generates
    nothing does not count: it is idle, paused or installs weights. Its first average is dropped,
    because engines compile and fill caches then.
    """

    def __init__(self) -> None:
        self._generators: dict[str, _Generator] = {}

    def reported(self, generator: str, stats: EngineStats, now: float) -> float | None:
        """A report has come; the generator's speed, if there is a new one.

        Args:
            generator: its name.
            stats: counters of its engine.
            now: in seconds of any clock.
        """
        known = self._generators.get(generator)
        if known is None:
            self._generators[generator] = _Generator(stats, now)
            return None
        tokens = stats.tokens.generated - known.stats.tokens.generated
        rows = (stats.running + known.stats.running) / 2
        if tokens > 0 and rows > 0:
            known.tokens += tokens
            known.row_seconds += rows * (now - known.reported)
        known.stats, known.reported = stats, now
        if known.row_seconds < min(ROW_SECONDS, 5.0 * max(1, stats.slots)):
            return None
        average = known.tokens / known.row_seconds
        known.tokens, known.row_seconds = 0, 0.0
        was_warm, known.is_warm = known.is_warm, True
        return average if was_warm else None
