"""Which groups are traced, and the ids of their traces.

Both follow from the run's trace key and the number of the group. So all processes agree without a
word, and no message carries an id. A trace is sampled as OpenTelemetry's `TraceIdRatioBased` would:
by the low 64 bits of its id.

What one process did with one group or sample, before it is made a span of OpenTelemetry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = str | bool | int | float


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that happened at one moment of a span."""

    name: str
    time: float
    """Unix time in seconds."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A piece of a trace."""

    name: str
    trace: int
    """Id of the trace, 128 bits."""
    parent: int | None
    """Id of the span that it is part of; None for the whole group."""
    start: float
    """Unix time in seconds."""
    end: float
    """Unix time in seconds."""
    attributes: Mapping[str, Value]
    events: tuple[TraceEvent, ...] = ()
    id: int | None = None
    """None: any."""
    failure: str = ""
    """Why it failed; empty if it did not."""


@dataclass(frozen=True, slots=True)
class TraceIds:
    """The ids of one run.

    Example:
        >>> ids = TraceIds("first", 0.5)
        >>> [group for group in range(8) if ids.is_traced(group)]
        [0, 1, 5, 6]
        >>> ids.is_traced(3) == TraceIds("first", 0.5).is_traced(3)
        True
    """

    key: str
    """Of the run; the same after a resume, another one for another run."""
    rate: float
    """Share of the groups that are traced, 0 to 1."""

    def is_traced(self, group: int) -> bool:
        """Whether the group of this number is traced."""
        return self.trace(group) & 0xFFFF_FFFF_FFFF_FFFF < round(self.rate * 2**64)

    def trace(self, group: int) -> int:
        """The id of a group's trace, 128 bits, not 0."""
        return self._hash(16, group) or 1

    def group_span(self, group: int) -> int:
        """The id of the span of the whole group, 64 bits, not 0."""
        return self._hash(8, group) or 1

    def sample_span(self, group: int, sample: int) -> int:
        """The id of the span of one of its samples, 64 bits, not 0."""
        return self._hash(8, group, sample) or 1

    def _hash(self, size: int, *numbers: int) -> int:
        text = ":".join([self.key, *map(str, numbers)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")
