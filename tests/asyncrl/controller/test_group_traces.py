"""The controller's part of a trace follows from what the scheduler is told and decides."""

from __future__ import annotations

from asyncrl.controller.group_traces import GroupTraces
from asyncrl.monitoring.tracing.tracer import TraceIds, Tracer, TraceSpan
from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands, events

G = "generator-0"
SAMPLES = SampleId(4, 0), SampleId(4, 1)


class Kept(list[TraceSpan]):
    put = list.append


def made(rate: float = 1.0) -> tuple[Kept, GroupTraces]:
    kept = Kept()
    return kept, GroupTraces(Tracer(TraceIds("k", rate), kept, float))


def test_a_group_from_its_first_draw_to_its_step() -> None:
    spans, traces = made()
    joined = events.GeneratorJoined(G, 2, 0)
    traces.note(joined, [commands.StartSample(G, one, 1) for one in SAMPLES])
    traces.note(events.SampleFinished(G, SAMPLES[0], 9, 0), [])
    verify = commands.VerifySamples(G, SAMPLES, 1)
    install = commands.InstallWeights(G, 1, (verify,))
    traces.note(events.WeightsPublished(1), [install])
    traces.note(events.SampleFinished(G, SAMPLES[1], 3, 1), [])
    deliver = commands.DeliverGroup(2, 4, tuple((G, one) for one in SAMPLES))
    traces.note(events.SampleFinished(G, SAMPLES[0], 8, 1), [deliver])
    for one in (*SAMPLES, SAMPLES[0]):  # an acknowledgement may come twice
        traces.note(events.SampleDelivered(G, one), [])
    assert [span.name for span in spans] == ["sample", "sample"]
    traces.note(events.StepFinished(2, (4, 5)), [])
    ids = TraceIds("k", 1.0)
    first, second, group = spans
    assert [name for name, *_ in first.events] == [
        "draw", "finished", "verification ordered", "finished", "delivery ordered",
    ]  # fmt: skip
    assert [about.get("asyncrl.tokens") for _, _, about in first.events] == [
        None, 9, None, 8, None,
    ]  # fmt: skip
    assert (first.id, second.id) == (ids.sample_span(4, 0), ids.sample_span(4, 1))
    assert {first.parent, second.parent} == {group.id} == {ids.group_span(4)}
    assert group.parent is None
    assert group.attributes == {
        "asyncrl.group": 4, "asyncrl.outcome": "trained", "asyncrl.samples": 2, "asyncrl.step": 2,
    }  # fmt: skip
    assert group.start <= first.start <= first.end <= group.end


def test_a_failed_group_says_why() -> None:
    spans, traces = made()
    traces.note(events.GeneratorJoined(G, 2, 0), [commands.StartSample(G, SAMPLES[0])])
    failed = events.SampleFailed(G, SAMPLES[0], "too long")
    traces.note(failed, [commands.ReportGroupFailed(4, "too long")])
    traces.note(events.SampleDelivered(G, SAMPLES[0]), [])  # late
    (group,) = spans
    assert (group.failure, group.attributes["asyncrl.outcome"]) == ("too long", "failed")


def test_nothing_is_kept_of_a_group_that_is_not_traced() -> None:
    rate = 0.5
    spans, traces = made(rate)
    for group in range(20):
        start = commands.StartSample(G, SampleId(group, 0))
        traces.note(events.WeightsPublished(group), [start])
    traces.note(events.StepFinished(0, tuple(range(20))), [])
    chosen = [group for group in range(20) if TraceIds("k", rate).is_traced(group)]
    assert [span.attributes["asyncrl.group"] for span in spans] == chosen
    assert 0 < len(chosen) < 20
