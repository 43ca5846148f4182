"""Records what a process does with traced groups, as a tree: group, its samples, work on each.

The traced groups and the ids of their traces follow from the run's trace key and the group number,
so all processes agree. The low 64 bits of an id decide, as in OpenTelemetry's `TraceIdRatioBased`.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from asyncrl.rollout.trajectory import SampleId

Value = str | bool | int | float
Values = Mapping[str, Value]
Moment = tuple[str, float, Values]
"""An event of a span: name, time, attributes."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A piece of a trace."""

    name: str
    trace: int
    """128 bits."""
    parent: int | None
    """Id of the span that it is part of; None for the whole group."""
    start: float
    """Unix seconds."""
    end: float
    attributes: Values
    events: tuple[Moment, ...] = ()
    """Events, with Unix times."""
    id: int | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TraceIds:
    """The ids of one run."""

    key: str
    """The run's key; the same after a resume, different for another run."""
    rate: float
    """Share of the groups that are traced, 0 to 1."""

    def is_traced(self, group: int) -> bool:
        """Return True if the group of this number is traced."""
        return self.trace(group) & 0xFFFF_FFFF_FFFF_FFFF < round(self.rate * 2**64)

    def trace(self, group: int) -> int:
        """Id of a group's trace, 128 bits, not 0."""
        return self._hash(16, group) or 1

    def group_span(self, group: int) -> int:
        """Id of the span of the whole group, 64 bits, not 0."""
        return self._hash(8, group) or 1

    def sample_span(self, group: int, sample: int) -> int:
        """Id of the span of one of its samples, 64 bits, not 0."""
        return self._hash(8, group, sample) or 1

    def _hash(self, size: int, *numbers: int) -> int:
        text = ":".join([self.key, *map(str, numbers)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")


class Sink(Protocol):
    """Takes spans; see `export.SpanExport`."""

    def put(self, span: TraceSpan) -> None:
        """Take a span, or drop it; returns at once."""


class Tracer:
    """Makes spans of one process; thread-safe if its sink is. `unix` converts readings of `now`."""

    def __init__(self, ids: TraceIds, sink: Sink, unix: Callable[[float], float]) -> None:
        self._ids = ids
        self._sink = sink
        self._unix = unix

    def is_traced(self, group: int) -> bool:
        """Return True if spans of this group are recorded."""
        return self._ids.is_traced(group)

    def now(self) -> float:
        """Current time, as the methods below take it."""
        return time.monotonic()

    def of_group(self, name: str, group: int, start: float, end: float, values: Values) -> None:
        """Record a span of a group as a whole; times are readings of `now`."""
        self._put(name, group, start, end, values, parent=self._ids.group_span(group))

    def of_sample(
        self,
        name: str,
        sample: SampleId,
        start: float,
        end: float,
        values: Values,
        events: tuple[Moment, ...] = (),
    ) -> None:
        """Record a span of one sample."""
        parent = self._ids.sample_span(sample.group, sample.sample)
        more = {"asyncrl.sample": sample.sample, **values}
        self._put(name, sample.group, start, end, more, events, parent=parent)

    def whole_sample(
        self, sample: SampleId, start: float, end: float, values: Values, events: tuple[Moment, ...]
    ) -> None:
        """Record the span that all others of the sample are part of."""
        group = sample.group
        more = {"asyncrl.sample": sample.sample, **values}
        own = self._ids.sample_span(group, sample.sample)
        parent = self._ids.group_span(group)
        self._put("sample", group, start, end, more, events, parent=parent, own=own)

    def whole_group(
        self, group: int, start: float, end: float, values: Values, *, failure: str = ""
    ) -> None:
        """Record the root of a group's trace."""
        own = self._ids.group_span(group)
        self._put("group", group, start, end, values, parent=None, own=own, failure=failure)

    def _put(
        self,
        name: str,
        group: int,
        start: float,
        end: float,
        values: Values,
        events: tuple[Moment, ...] = (),
        *,
        parent: int | None,
        own: int | None = None,
        failure: str = "",
    ) -> None:
        about = {"asyncrl.group": group, **values}
        moments = tuple((what, self._unix(when), more) for what, when, more in events)
        trace, began, ended = self._ids.trace(group), self._unix(start), self._unix(end)
        span = TraceSpan(name, trace, parent, began, ended, about, moments, own, failure)
        self._sink.put(span)
