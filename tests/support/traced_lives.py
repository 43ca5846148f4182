"""Checks that each traced sample of a run has its whole life, in order."""

from __future__ import annotations

import itertools
from pathlib import Path

from trace_collector import Span

from asyncrl.monitoring.records.spans import read_timelines
from asyncrl.monitoring.tracing.tracer import TraceIds
from asyncrl.runs.directory import read_state

_SKEW = 0.005
"""Seconds by which two processes that read one clock may differ."""


def check_lives(
    spans: list[Span], run: Path, *, rate: float, groups: int, group_size: int, per_step: int
) -> None:
    """Every group of a finished run that the rate chooses was traced, and no other one."""
    state = read_state(run)
    assert state is not None
    ids = TraceIds(state.trace_key, rate)
    wanted = {group for group in range(groups) if ids.is_traced(group)}
    # Work that ran ahead of the last step has begun and is in no step.
    seen = {span.group for span in spans if span.group < groups}
    assert seen == wanted
    assert all(ids.is_traced(span.group) for span in spans)
    of_trainer = read_timelines(run / "timeline")["trainer"]
    for group in wanted:
        own = [span for span in spans if span.group == group]
        assert {span.trace for span in own} == {ids.trace(group).to_bytes(16, "big")}
        (root,) = [span for span in own if not span.parent]
        assert root.attributes["asyncrl.outcome"] == "trained"
        parts = {span.name: span for span in own if span.parent == root.id and span.sample is None}
        assert set(parts) == {"train", "optimizer step"}
        train, step = parts["train"], parts["optimizer step"]
        in_order(root.start, train.start, train.end, step.start, step.end, root.end)
        for part in (train, step):
            middle = (part.start + part.end) / 2
            assert part.attributes["asyncrl.step"] == group // per_step
            assert any(
                span.kind == "training"
                and span.args["step"] == group // per_step
                and span.start <= middle <= span.end
                for span in of_trainer
            ), "the time line says something else"
        for number in range(group_size):
            life = [span for span in own if span.sample == number]
            check_life(life, root, train)


def check_life(life: list[Span], root: Span, train: Span) -> None:
    (whole,) = [span for span in life if span.name == "sample"]
    assert whole.parent == root.id
    assert {span.parent for span in life} == {root.id, whole.id}
    moments = [event.name for event in whole.events]
    assert moments[0] == "draw"
    assert moments[-1] == "delivery ordered"
    assert "finished" in moments
    attempts = sorted(
        (span for span in life if span.name in ("generate", "verify")), key=lambda one: one.start
    )
    in_order(
        root.start,
        whole.events[0].time,
        *(moment for span in attempts for moment in (span.start, span.end)),
    )
    for span in attempts:
        in_order(span.start, *(event.time for event in span.events), span.end)
        ended = span.attributes["asyncrl.finish_reason"]
        assert (ended == "abort") == any(event.name == "interrupt" for event in span.events)
    assert attempts[-1].attributes["asyncrl.finish_reason"] in ("stop", "length")
    rewards = sorted(span.start for span in life if span.name == "reward")
    (deliver,) = [span for span in life if span.name == "deliver"]
    in_order(attempts[0].end, rewards[0], deliver.start)
    in_order(attempts[-1].end, deliver.start)
    in_order(whole.events[-1].time, deliver.start, deliver.end, whole.end)
    in_order(deliver.start, train.start)


def in_order(*moments: float) -> None:
    for earlier, later in itertools.pairwise(moments):
        assert earlier <= later + _SKEW, moments
