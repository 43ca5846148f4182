"""How long a process has been in its present phase, and how long such phases usually last."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from asyncrl.monitoring.records.spans import Span, continues

_GAP = 0.05
"""Seconds between two pieces of one phase, at most."""
_REMEMBERED = 51
"""Ended phases of a kind that the median is taken over."""
ENOUGH = 5
"""Ended phases of a kind before there is a median."""


@dataclass(slots=True)
class Phases:
    """Follows a time line whose pieces do not overlap: a phase is a row of equal pieces.

    Example:
        >>> phases = Phases()
        >>> for n in range(6):
        ...     _ = phases.add(Span("training", 3.0 * n, 3.0 * n + 2.0, {"step": n}))
        >>> phases.present.seconds, phases.usual("training")
        (2.0, 2.0)
    """

    present: Span | None = None
    """The present phase, as far as it has been reported."""
    _ended: dict[str, deque[float]] = field(default_factory=dict)
    """By kind: seconds of the phases that have ended, the newest last."""

    def add(self, piece: Span) -> Span | None:
        """Add a piece of the time line; returns the phase that it ends, None if it ends none."""
        before = self.present
        if before is not None and continues(before, piece, _GAP):
            self.present = Span(before.kind, before.start, max(before.end, piece.end), before.args)
            return None
        self.present = piece
        if before is not None:
            self._ended.setdefault(before.kind, deque(maxlen=_REMEMBERED)).append(before.seconds)
        return before

    def usual(self, kind: str) -> float | None:
        """Median of the last phases of a kind, in seconds; None until there were `ENOUGH`."""
        ended = self._ended.get(kind, ())
        return median(ended) if len(ended) >= ENOUGH else None
