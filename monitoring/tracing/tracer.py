"""Records what a process does with the groups that are traced.

    tracer.is_traced(group)                       # ask first: it costs a hash
    tracer.of_group("train", group, began, ended, {"step": 3})
    tracer.of_sample("reward", sample, began, ended, {})

A trace has one tree: the group, its samples in it, and what was done to each in these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from asyncrl.monitoring.tracing.ids import TraceEvent, TraceIds, TraceSpan, Value
from asyncrl.rollout.trajectory import SampleId

Moment = tuple[str, float, Mapping[str, Value]]
"""An event: name, reading of `time.monotonic`, attributes."""


class Sink(Protocol):
    """Takes spans. `asyncrl.monitoring.tracing.export.SpanExport` is one."""

    def put(self, span: TraceSpan) -> None:
        """Take a span, or drop it; returns at once."""


class Tracer:
    """Makes spans of one process. Thread-safe if its sink is.

    Args:
        ids: of the run.
        sink: gets the spans.
        unix: turns readings of `time.monotonic` into Unix time, as the process's time line does.
    """

    def __init__(self, ids: TraceIds, sink: Sink, unix: Callable[[float], float]) -> None:
        self._ids = ids
        self._sink = sink
        self._unix = unix

    def is_traced(self, group: int) -> bool:
        """Whether spans of this group are recorded."""
        return self._ids.is_traced(group)

    def now(self) -> float:
        """Now, as the methods below take it."""
        return time.monotonic()

    def of_group(
        self, name: str, group: int, start: float, end: float, attributes: Mapping[str, Value]
    ) -> None:
        """Record a span of a group as a whole; times are readings of `now`."""
        self._put(name, group, start, end, attributes, parent=self._ids.group_span(group))

    def of_sample(
        self,
        name: str,
        sample: SampleId,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        events: tuple[Moment, ...] = (),
    ) -> None:
        """Record a span of one sample."""
        parent = self._ids.sample_span(sample.group, sample.sample)
        more = {"asyncrl.sample": sample.sample, **attributes}
        self._put(name, sample.group, start, end, more, events, parent=parent)

    def whole_sample(
        self,
        sample: SampleId,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        events: tuple[Moment, ...],
    ) -> None:
        """Record the span that all others of the sample are part of."""
        group = sample.group
        more = {"asyncrl.sample": sample.sample, **attributes}
        own = self._ids.sample_span(group, sample.sample)
        parent = self._ids.group_span(group)
        self._put("sample", group, start, end, more, events, parent=parent, own=own)

    def whole_group(
        self,
        group: int,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        *,
        failure: str = "",
    ) -> None:
        """Record the root of a group's trace."""
        own = self._ids.group_span(group)
        self._put("group", group, start, end, attributes, parent=None, own=own, failure=failure)

    def _put(
        self,
        name: str,
        group: int,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        events: tuple[Moment, ...] = (),
        *,
        parent: int | None,
        own: int | None = None,
        failure: str = "",
    ) -> None:
        self._sink.put(
            TraceSpan(
                name,
                self._ids.trace(group),
                parent,
                self._unix(start),
                self._unix(end),
                {"asyncrl.group": group, **attributes},
                tuple(TraceEvent(what, self._unix(when), more) for what, when, more in events),
                own,
                failure,
            )
        )
