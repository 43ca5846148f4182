"""What one process did with one group or sample, before it is made a span of OpenTelemetry."""

from __future__ import annotations

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
