"""Counts that add up, and the waits of a step that lie within it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_records import full_step

from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import StepMetrics, TokenCounts, TrainerTimes

counts = st.builds(
    TokenCounts,
    **{name: st.integers(0, 1 << 40) for name in TokenCounts.__struct_fields__},
)


@given(counts, counts)
def test_counts_add_and_subtract_field_by_field(a: TokenCounts, b: TokenCounts) -> None:
    for name in TokenCounts.__struct_fields__:
        assert getattr(a + b, name) == getattr(a, name) + getattr(b, name)
    assert a + b - b == a
    assert sum([a, b], start=TokenCounts()) == b + a


def test_reward_counts_add_and_describe_themselves() -> None:
    a = RewardCounts(failed={"f": {"raised": 1}}, retried=2, largest={"f": 2e6})
    b = RewardCounts(failed={"f": {"raised": 2, "not_finite": 1}, "g": {"died": 1}}, retried=1)
    both = a + b
    assert both == b + a
    assert both.failed == {"f": {"raised": 3, "not_finite": 1}, "g": {"died": 1}}
    assert (both.retried, both.largest, both.failures) == (3, {"f": 2e6}, 5)
    assert both.describe_failures() == "f: 1 not finite, 3 raised; g: 1 died"
    assert a.failed == {"f": {"raised": 1}}


def test_the_wire_and_the_file_carry_a_step_alike() -> None:
    step = full_step()
    assert msgspec.json.decode(msgspec.json.encode(step), type=StepMetrics) == step
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepMetrics) == step
    with pytest.raises(msgspec.ValidationError, match="step"):
        msgspec.json.decode(b'{"time": 1.0}', type=StepMetrics)


@pytest.mark.parametrize(
    ("seconds", "waits"),
    [
        (10.0, (6.0, 4.0, 2.0)),
        (8.0, (5.0, 3.0, 2.0)),  # the first wait began before the step did
        (5.0, (2.0, 0.0, 2.0)),
        (4.0, (1.0, 0.0, 1.0)),
        (1.0, (0.0, 0.0, 0.0)),
    ],
)
def test_waits_lie_within_the_step(seconds: float, waits: tuple[float, float, float]) -> None:
    times = TrainerTimes(
        train_seconds=2.5,
        publish_seconds=0.5,
        wait_seconds=6.0,
        wait_first_seconds=4.0,
        wait_last_seconds=2.0,
    ).within(seconds)
    assert (times.wait_seconds, times.wait_first_seconds, times.wait_last_seconds) == waits
    assert (times.train_seconds, times.publish_seconds) == (2.5, 0.5)
