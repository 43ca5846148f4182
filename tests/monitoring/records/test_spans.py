import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.monitoring.records.spans import (
    UNACCOUNTED,
    RecentIdle,
    Span,
    SpanKind,
    absent_seconds,
    clip,
    flatten,
    idle_by_cause,
    idle_ratio,
    merge,
)

times = st.integers(0, 60).map(float)


@st.composite
def some_span(draw):
    start, length = draw(times), draw(st.integers(1, 12))
    kind = draw(st.sampled_from([*SpanKind, "from_the_future"]))
    args = {"for": draw(st.sampled_from(["weights", "admission"]))} if kind == "waiting" else {}
    return Span(str(kind), start, start + length, args)


spans = st.lists(some_span(), max_size=25)


def covered(some, second):
    return any(span.start <= second < span.end for span in some)


@settings(max_examples=80)
@given(spans)
def test_flattening_neither_loses_nor_doubles_time(some):
    flat = flatten(some)
    assert all(a.end <= b.start for a, b in itertools.pairwise(flat))
    seconds = sum(covered(some, second + 0.5) for second in range(80))
    assert sum(span.seconds for span in flat) == pytest.approx(seconds)


@settings(max_examples=80)
@given(spans)
def test_work_always_wins_over_waiting(some):
    for second in range(80):
        running = [one for one in some if one.start <= second < one.end]
        shown = [one for one in flatten(some) if one.start <= second < one.end]
        if any(one.kind != "waiting" for one in running):
            assert shown[0].kind != "waiting"


@settings(max_examples=80)
@given(spans)
def test_merging_keeps_every_moment_of_every_kind(some):
    merged = merge(some)
    assert len(merged) <= len(some)
    for kind in {span.kind for span in some}:
        for second in range(80):
            assert covered([s for s in some if s.kind == kind], second) == covered(
                [s for s in merged if s.kind == kind], second
            )


@settings(max_examples=80)
@given(spans, times, st.integers(1, 40))
def test_idle_shares_add_up(some, start, length):
    shares = idle_by_cause(some, start, start + length)
    ratio = idle_ratio(some, start, start + length)
    assert 0.0 <= ratio <= 1.0
    assert math.isclose(sum(shares.values()), ratio, abs_tol=1e-9)
    busy = sum(
        covered([s for s in some if s.kind != "waiting"], start + second + 0.5)
        for second in range(length)
    )
    assert ratio == pytest.approx(1.0 - busy / length)


def test_idle_time_is_named():
    waiting = Span("waiting", 5, 7, {"for": "trajectories"})
    some = [Span("training", 0, 5), waiting, Span("training", 9, 10)]
    assert idle_by_cause(some, 0, 10) == pytest.approx({"trajectories": 0.2, UNACCOUNTED: 0.2})
    assert idle_ratio([], 0, 1) == 1.0
    with pytest.raises(ValueError, match="end after the start"):
        idle_ratio(some, 3, 3)


def test_clip_cuts_at_the_edges():
    assert clip([Span("training", 0, 5), Span("training", 8, 9)], 2, 8) == [Span("training", 2, 5)]


def test_merge_bridges_small_gaps_of_equal_spans_only():
    a, b = Span("training", 0, 1, {"step": 1}), Span("training", 1.001, 2, {"step": 1})
    c = Span("training", 2, 3, {"step": 2})
    assert merge([c, b, a], gap=0.002) == [Span("training", 0, 2, {"step": 1}), c]


@settings(max_examples=80)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 9), st.integers(0, 3))))
def test_running_idle_shares_equal_those_computed_afresh(pieces):
    recent, some, at = RecentIdle(12.0), [], 0.0
    for cause, length, gap in pieces:
        at += gap
        kind, args = ("waiting", {"for": cause}) if cause else ("training", {})
        one = Span(kind, at, at + length, args)
        at += length
        some.append(one)
        got = recent.add(one)
        # Time before the oldest piece that reaches into the last 12 s does not count.
        start = max(at - 12.0, 0.0)
        start = max(start, min(s.start for s in some if s.end > start))
        wanted = idle_by_cause(some, start, at)
        assert {c: s for c, s in got.items() if s > 1e-9} == pytest.approx(wanted)


def test_a_cause_without_recent_share_stays_at_zero():
    recent = RecentIdle(10.0)
    assert recent.add(Span("waiting", 0.0, 5.0, {"for": "weights"}))["weights"] == 1.0
    assert recent.add(Span("training", 5.0, 20.0)) == {"weights": 0.0, UNACCOUNTED: 0.0}


@given(st.lists(spans, max_size=3))
def test_time_without_processes_is_what_no_process_covers_for_longer_than_a_second(lanes):
    together = [one for lane in lanes for one in lane]
    bare = [second for second in range(80) if not covered(together, second + 0.5)]
    alone = [n for n in bare if n - 1 not in bare and n + 1 not in bare]
    expected = len(bare) - len(alone)
    assert absent_seconds(lanes, 0.0, 80.0) == (expected if together else 0.0)


def test_time_without_processes_counts_as_neither_busy_nor_idle():
    some = [Span("training", 0.0, 6.0), Span("waiting", 106.0, 110.0, {"for": "weights"})]
    absent = absent_seconds([some], 0.0, 110.0)
    assert absent == 100.0
    assert idle_by_cause(some, 0.0, 110.0, absent=absent) == {"weights": 0.4}
    with pytest.raises(ValueError, match="do not count"):
        idle_by_cause(some, 0.0, 110.0, absent=110.0)
