"""The controller's traces of groups: from the first draw to the optimizer step.

It observes the scheduler and changes nothing. A group's trace ends with its training step, or
with its failure. Other processes record their spans of its samples (`monitoring.tracing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.metrics.metrics import ControllerMetrics
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.monitoring.tracing import open_tracer
from asyncrl.monitoring.tracing.tracer import Moment, Tracer, Value, Values
from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events

_MAX_EVENTS = 64
"""Limit per sample; later events are dropped."""


@dataclass(slots=True)
class _Sample:
    began: float
    events: list[Moment] = field(default_factory=list)
    is_delivered: bool = False


@dataclass(slots=True)
class _Group:
    began: float
    samples: dict[SampleId, _Sample] = field(default_factory=dict)


def open_group_traces(
    config: RunConfig, key: str, metrics: ControllerMetrics, closing: AsyncExitStack
) -> GroupTraces | None:
    """Open the controller's traces, if `monitoring.tracing` is on; `key` is the run's."""
    settings = config.monitoring.tracing
    if not settings.enabled:
        return None
    names = {"key": key, "run": config.run.name, "process": "controller"}
    unix = Timeline(None, "controller").unix
    return GroupTraces(open_tracer(settings, closing, metrics=metrics, unix=unix, **names))


class GroupTraces:
    """Records groups, their samples, and the scheduler's decisions on them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._groups: dict[int, _Group] = {}

    def note(self, event: events.Event, decided: Iterable[commands.Command]) -> None:
        """Note an event and the scheduler's decisions on it."""
        now = self._tracer.now()
        match event:
            case events.SampleFinished(generator=name, sample=sample, length=length):
                what: dict[str, Value] = {"asyncrl.tokens": length, "asyncrl.generator": name}
                self._happened(sample, "finished", now, what)
            case events.SampleDelivered():
                self._delivered(event, now)
            case events.StepFinished():
                for group in event.groups:
                    self._settled(group, now, {"asyncrl.step": event.step})
            case _:
                pass
        for command in decided:
            self._decided(command, now)

    def _decided(self, command: commands.Command, now: float) -> None:
        match command:
            case commands.StartSample(generator=name, sample=sample, priority=priority):
                more: dict[str, Value] = {"asyncrl.generator": name, "asyncrl.priority": priority}
                if self._tracer.is_traced(sample.group):
                    group = self._groups.setdefault(sample.group, _Group(now))
                    group.samples.setdefault(sample, _Sample(now)).is_delivered = False
                    self._happened(sample, "draw", now, more)
            case commands.VerifySamples():
                self._verification(command, now)
            case commands.InstallWeights():
                for verification in command.verify:
                    self._verification(verification, now)
            case commands.DeliverGroup():
                for _, sample in command.samples:
                    self._happened(sample, "delivery ordered", now, {"asyncrl.step": command.step})
            case commands.ReportGroupFailed():
                self._settled(command.group, now, {}, failure=command.reason)
            case _:
                pass

    def _verification(self, command: commands.VerifySamples, now: float) -> None:
        more = {"asyncrl.min_version": command.min_version}
        for sample in command.samples:
            self._happened(sample, "verification ordered", now, more)

    def _happened(self, sample: SampleId, name: str, now: float, values: Values) -> None:
        group = self._groups.get(sample.group)
        found = None if group is None else group.samples.get(sample)
        if found is not None and len(found.events) < _MAX_EVENTS:
            found.events.append((name, now, values))

    def _delivered(self, event: events.SampleDelivered, now: float) -> None:
        group = self._groups.get(event.sample.group)
        found = None if group is None else group.samples.get(event.sample)
        if found is None or found.is_delivered:
            return
        found.is_delivered = True
        more = {"asyncrl.generator": event.generator}
        self._tracer.whole_sample(event.sample, found.began, now, more, tuple(found.events))

    def _settled(self, group: int, now: float, values: Values, *, failure: str = "") -> None:
        if (found := self._groups.pop(group, None)) is None:
            return
        more: dict[str, Value] = {"asyncrl.samples": len(found.samples), **values}
        more["asyncrl.outcome"] = "failed" if failure else "trained"
        self._tracer.whole_group(group, found.began, now, more, failure=failure)
