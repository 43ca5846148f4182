"""What all generators of a run have done together: so far, and lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.wire.records.step import EngineStats, TokenCounts

RATE_SECONDS = 3.0
"""Shortest time over which rates are taken: generators report twice a second, and a step may take
less than that."""


class _Work(NamedTuple):
    """Summed over generators, since their processes began."""

    tokens: TokenCounts = TokenCounts()
    busy_seconds: float = 0.0


class RecentWork(NamedTuple):
    """Rates over the last seconds."""

    tokens_per_second: float
    """Response tokens generated, all generators together."""
    busy_share: float
    """Engine time inside steps, in seconds per second, all generators together."""


@dataclass(slots=True)
class GenerationTotals:
    """Adds up the counters of all generators, lost ones included.

    Times are seconds of a monotonic clock.
    """

    began: float
    """When the training phase began."""
    _now: _Work = field(default_factory=_Work)
    _base: _Work = field(default_factory=_Work)
    _history: deque[tuple[float, _Work]] = field(default_factory=deque)

    def update(self, engines: Iterable[EngineStats]) -> None:
        """Take in the last report of every generator that ever was."""
        engines = list(engines)
        tokens = sum((one.tokens for one in engines), start=TokenCounts())
        self._now = _Work(tokens, sum(one.busy_seconds for one in engines))

    def begin(self, now: float) -> None:
        """The training phase begins: count from here."""
        self.began, self._base = now, self._now
        self._history = deque([(now, self._now)])

    @property
    def tokens(self) -> TokenCounts:
        """Counted in the training phase."""
        return self._now.tokens - self._base.tokens

    @property
    def busy_seconds(self) -> float:
        """Engine time inside steps in the training phase."""
        return self._now.busy_seconds - self._base.busy_seconds

    def recent(self, now: float) -> RecentWork:
        """Rates up to now, over `RATE_SECONDS` at least where there was that much."""
        history = self._history
        history.append((now, self._now))
        while len(history) > 2 and history[1][0] <= now - RATE_SECONDS:
            history.popleft()
        began, before = history[0]
        seconds = max(1e-9, now - began)
        return RecentWork(
            (self._now.tokens - before.tokens).generated / seconds,
            (self._now.busy_seconds - before.busy_seconds) / seconds,
        )
