"""Duration of a process's current phase, and the usual duration of such phases."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from asyncrl.monitoring.records.spans import Span, continues

_GAP = 0.05
"""Longest gap between two pieces of one phase, in seconds."""
_REMEMBERED = 51
ENOUGH = 5
"""Ended phases of a kind that a median needs."""


@dataclass(slots=True)
class Phases:
    """Follows a timeline whose pieces do not overlap: a phase is a row of equal pieces.

    >>> phases = Phases()
    >>> for n in range(6):
    ...     _ = phases.add(Span("training", 3.0 * n, 3.0 * n + 2.0, {"step": n}))
    >>> phases.present.seconds, phases.usual("training")
    (2.0, 2.0)
    """

    present: Span | None = None
    _ended: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, piece: Span) -> Span | None:
        """Add a piece of the timeline; return the phase that it ends, if any."""
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
