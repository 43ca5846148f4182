"""How fast each generator is, relative to the others.

Measured speeds are compared with their geometric mean. Generators whose speeds are alike count as
equally fast, so that a fleet of equal ones is treated as if nothing had been measured, and noise
changes no decision. One that was not measured yet counts as one of them.

Speeds decide where groups are placed, and nothing else. They do not depend on what is drawn.
"""

from __future__ import annotations

import math

from asyncrl.scheduler.records import Generator

ALIKE = 1.35
"""Up to this factor from the mean, speeds count as equal."""
_WEIGHT = 0.3
"""Of a new measurement against the earlier ones: few running samples are faster than many."""
_STEP = 1.15
"""A relative speed changes only if it is off by more than this factor."""


class Speeds:
    """The measured speeds. O(1) for each measurement."""

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._sum = 0.0

    def measured(self, generator: Generator, tokens_per_row_second: float) -> bool:
        """Take note of a speed; whether the generator's relative speed has changed.

        Args:
            generator: the one that was measured.
            tokens_per_row_second: tokens that it generates for each running sample per second.
        """
        if not 0.0 < tokens_per_row_second < math.inf:
            return False
        log = math.log(tokens_per_row_second)
        if (before := self._logs.get(generator.name)) is not None:
            log = before + _WEIGHT * (log - before)
            self._sum -= before
        self._sum += log
        self._logs[generator.name] = log
        relative = math.exp(log - self._sum / len(self._logs))
        if 1 / ALIKE <= relative <= ALIKE:
            relative = 1.0
        if generator.speed / _STEP <= relative <= generator.speed * _STEP and relative != 1.0:
            return False
        changed = relative != generator.speed
        generator.speed = relative
        return changed

    def forget(self, generator: Generator) -> None:
        """A generator is gone."""
        self._sum -= self._logs.pop(generator.name, 0.0)
