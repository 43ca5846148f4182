"""The time line of a generator: one kind at a time, a cause when idle, every slot counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from asyncrl.generator.activity import (
    Activity,
    GeneratorState,
    cause_of_waiting,
    kind_of,
    slots_of,
)
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry
from asyncrl.monitoring.metrics.occupancy import read_slots, slot_shares
from asyncrl.monitoring.records.spans import SpanKind, read_spans
from asyncrl.monitoring.records.timeline import Clock, Timeline

COUNTS = st.integers(0, 9)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (GeneratorState(slots=4, running=2, primary=1, run_ahead=1), SpanKind.GENERATING),
        (GeneratorState(slots=4, running=2, run_ahead=2), SpanKind.RUN_AHEAD),
        (
            GeneratorState(slots=4, running=3, primary=1, verifying=1, run_ahead=1),
            SpanKind.VERIFYING,
        ),
        (GeneratorState(slots=4, running=2, primary=1, evaluating=1), SpanKind.EVALUATING),
        (GeneratorState(slots=4, running=1), SpanKind.GENERATING),
        (
            GeneratorState(slots=4, running=4, primary=4, installing=3),
            SpanKind.TRANSFERRING_WEIGHTS,
        ),
        (GeneratorState(slots=4, running=4, primary=4, paused=True), SpanKind.WAITING),
        (GeneratorState(slots=4, rewarding=1, held=3), SpanKind.WAITING),
        (GeneratorState(slots=4, primary=2), SpanKind.WAITING),
        (GeneratorState(slots=4), SpanKind.WAITING),
    ],
)
def test_the_most_important_kind_is_recorded(state, kind):
    assert kind_of(state) is kind


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (GeneratorState(paused=True, delivered_step=3, policy_version=3), "resume"),
        (GeneratorState(rewarding=1, held=3, delivered_step=3, policy_version=3), "rewards"),
        (GeneratorState(delivered_step=3, policy_version=3, held=2), "new weights"),
        (GeneratorState(delivered_step=4, policy_version=3), "new weights"),
        (GeneratorState(delivered_step=3, policy_version=4, held=2), "other samples"),
        (GeneratorState(delivered_step=3, policy_version=4), "prompts"),
        (GeneratorState(policy_version=0), "prompts"),
    ],
)
def test_an_idle_generator_has_a_cause_of_waiting(state, cause):
    assert cause_of_waiting(state) == cause


@given(COUNTS, COUNTS, st.tuples(COUNTS, COUNTS, COUNTS, COUNTS))
def test_slots_are_attributed_by_priority_and_none_is_lost(slots, running, wanted):
    primary, verifying, run_ahead, evaluating = wanted
    state = GeneratorState(slots, running, primary, verifying, run_ahead, evaluating)
    used = slots_of(state)
    assert sum(used.values()) == min(slots, running)
    assert used.get("verifying", 0) <= verifying
    assert used.get("run_ahead", 0) <= run_ahead
    if used.get("run_ahead"):
        assert used.get("primary", 0) >= primary
        assert used.get("verifying", 0) == verifying
    assert slots_of(GeneratorState(slots=slots, running=running, installing=2)) == {
        "stopped": slots
    }


def test_notes_become_spans_slot_seconds_and_metrics_without_a_gap(tmp_path):
    now = [100.0]
    clock = Clock(monotonic=lambda: now[0], wall=lambda: 1000.0 + now[0])
    registry = new_registry()
    metrics = GeneratorMetrics.register(registry, "generator-0")
    timeline = Timeline(
        tmp_path / "timeline.jsonl", "generator-0", clock=clock, observe=metrics.observe_span
    )
    activity = Activity(timeline, metrics, tmp_path / "slots.jsonl")
    now[0] += 1.0  # before the first note: not recorded
    for seconds, state in (
        (2.0, GeneratorState(slots=4, running=4, primary=3, run_ahead=1)),
        (1.0, GeneratorState(slots=4, running=1, primary=1)),
        (1.0, GeneratorState(slots=4, installing=6)),
        (1.0, GeneratorState(slots=4, running=2, verifying=2)),
        (3.0, GeneratorState(slots=4, running=2, run_ahead=2)),
        (2.0, GeneratorState(slots=4, delivered_step=6, policy_version=6)),
    ):
        activity.note(state)
        now[0] += seconds
    activity.close()
    now[0] += 5.0
    activity.close()
    timeline.close()
    spans = read_spans(tmp_path / "timeline.jsonl")
    assert [(span.kind, span.seconds, span.args) for span in spans] == [
        ("generating", 3.0, {}),
        ("transferring_weights", 1.0, {"version": 6}),
        ("verifying", 1.0, {}),
        ("run_ahead", 3.0, {}),
        ("waiting", 2.0, {"for": "new weights"}),
    ]
    assert spans[0].start == 1101.0
    pieces = read_slots(tmp_path / "slots.jsonl")
    assert slot_shares(pieces, 0.0, 1e9) == pytest.approx(
        {
            "primary": 7 / 40,
            "verifying": 2 / 40,
            "run_ahead": 8 / 40,
            "stopped": 4 / 40,
            "idle": 19 / 40,
        }
    )
    text = generate_latest(registry).decode()
    assert 'asyncrl_slot_seconds_total{kind="idle",process="generator-0"} 19.0' in text
    assert 'asyncrl_idle_ratio{cause="new weights",process="generator-0"} 0.2' in text
    assert 'asyncrl_idle_ratio{cause="unaccounted",process="generator-0"} 0.0' in text
