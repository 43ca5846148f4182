"""The Prometheus metrics of every process, and of every process with a timeline."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

from prometheus_client import CollectorRegistry, Gauge

from asyncrl.monitoring.metrics.instruments import By, Total, build, counter, gauge, specs_of
from asyncrl.monitoring.records.spans import Phases, RecentIdle, Span, SpanKind
from asyncrl.wire.records.step import LearnerMetrics
from asyncrl.wire.transport.decoding import Reason

# ruff: noqa: RUF009 - the calls below make dataclass fields; ruff cannot see that through a helper

_KINDS = frozenset(kind.value for kind in SpanKind)


class Resending(Protocol):
    """One end of a session, or all those of a hub (`asyncrl.wire.sessions`)."""

    count_resent: Callable[[int], None]

    @property
    def unacknowledged(self) -> int:
        """Frames that the other end may lack."""


@dataclass(frozen=True, slots=True)
class CommonMetrics:
    """Metrics of every process."""

    frames_refused: By[Total] = counter(
        "asyncrl_frames_refused_total",
        "Frames from other processes that were not accepted, by reason.",
        labels={"reason": tuple(reason.value for reason in Reason)},
    )
    trace_spans: By[Total] = counter(
        "asyncrl_trace_spans_total",
        "Spans of traces, by whether the collector took them.",
        labels={"outcome": ("sent", "dropped")},
    )
    frames_resent: Total = counter(
        "asyncrl_session_resent_frames_total",
        "Frames that were sent again through a relay because an acknowledgement was missing.",
    )
    frames_unacknowledged: Gauge = gauge(
        "asyncrl_session_unacknowledged_frames",
        "Frames sent through a relay that the other end may lack.",
    )

    @classmethod
    def register(cls, registry: CollectorRegistry, process: str) -> Self:
        """Create metrics labelled with the process's name. Raises ValueError if they exist."""
        return cls(**{name: build(spec, registry, process) for name, spec in specs_of(cls)})

    def set_gauges(self, record: LearnerMetrics) -> None:
        """Set the gauges that read a step's record; one whose value is None keeps its last."""
        for name, spec in specs_of(type(self)):
            value = None if spec.value is None else spec.value(record)
            if value is not None:
                getattr(self, name).set(value)

    def count_refused(self, reason: Reason) -> None:
        """Count a refused frame; pass this to `Refusals(count=...)`."""
        self.frames_refused.of(reason).inc()

    def watch_session(self, session: Resending) -> None:
        """Count a session's resent frames, and measure what it keeps whenever metrics are read."""
        session.count_resent = self.frames_resent.inc
        self.frames_unacknowledged.set_function(lambda: session.unacknowledged)


@dataclass(frozen=True, slots=True)
class ProcessMetrics(CommonMetrics):
    """Metrics of every process with a timeline: all but relays."""

    policy_version: Gauge = gauge(
        "asyncrl_policy_version", "Optimizer steps in the weights that this process uses."
    )
    activity: By[Total] = counter(
        "asyncrl_activity_seconds_total",
        "Time spent, by what the process did.",
        labels={"kind": tuple(kind.value for kind in SpanKind)},
    )
    idle: By[Total] = counter(
        "asyncrl_idle_seconds_total", "Time spent waiting, by cause.", labels={"cause": None}
    )
    idle_ratio: By[Gauge] = gauge(
        "asyncrl_idle_ratio",
        "Share of the last minute spent waiting, by cause; causes add up.",
        labels={"cause": None},
    )
    phase: By[Gauge] = gauge(
        "asyncrl_phase_seconds",
        "How long the present phase has lasted, by its kind; 0 for all other kinds.",
        labels={"kind": tuple(kind.value for kind in SpanKind)},
    )
    phase_median: By[Gauge] = gauge(
        "asyncrl_phase_median_seconds",
        "Median length of the last phases, by kind; 0 until there were five.",
        labels={"kind": tuple(kind.value for kind in SpanKind)},
    )
    recent: RecentIdle = field(default_factory=RecentIdle, kw_only=True, repr=False)
    """Last minute of the timeline. Not a metric."""
    phases: Phases = field(default_factory=Phases, kw_only=True, repr=False)
    """The current phase and the lengths of the last ones. Not a metric."""

    def observe_span(self, span: Span) -> None:
        """Count a piece of the timeline; pass this to `Timeline(observe=...)`."""
        if span.kind in _KINDS:
            self.activity.of(span.kind).inc(span.seconds)
        if span.kind == SpanKind.WAITING:
            self.idle.of(span.cause).inc(span.seconds)
        for cause, share in self.recent.add(span).items():
            self.idle_ratio.of(cause).set(share)
        ended = self.phases.add(span)
        if ended is not None and ended.kind in _KINDS:
            self.phase.of(ended.kind).set(0)
            self.phase_median.of(ended.kind).set(self.phases.usual(ended.kind) or 0)
        present = self.phases.present
        if present is not None and present.kind in _KINDS:
            self.phase.of(present.kind).set(present.seconds)
