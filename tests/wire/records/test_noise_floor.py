"""Measurements of the noise floor add up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.wire.records.noise_floor import NoiseFloor


@st.composite
def measurements(draw: st.DrawFn) -> NoiseFloor:
    judged = draw(st.integers(0, 10_000))
    rejected = draw(st.integers(0, judged))
    samples = draw(st.integers(0, 99))
    return NoiseFloor(
        samples=samples,
        cut_samples=draw(st.integers(0, samples)),
        judged=judged,
        rejected=rejected,
        abs_mean=draw(st.floats(0, 9)) if rejected < judged else None,
    )


@given(st.lists(measurements(), max_size=5))
def test_the_sum_of_measurements_is_the_measurement_of_all(parts: list[NoiseFloor]) -> None:
    whole = sum(parts, start=NoiseFloor())
    for name in ("samples", "cut_samples", "judged", "rejected"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    if whole.accepted:
        apart = sum(part.accepted * (part.abs_mean or 0.0) for part in parts)
        assert whole.abs_mean == pytest.approx(apart / whole.accepted, rel=1e-9)
    else:
        assert whole.abs_mean is None


def test_the_share_of_nothing_is_unknown() -> None:
    assert NoiseFloor().share is None
    assert NoiseFloor(judged=8, rejected=2).share == 0.25


@pytest.mark.parametrize(
    "sent",
    [{"judged": 3, "rejected": 4, "abs_mean": 0.1}, {"samples": 1, "cut_samples": 2, "judged": 9}],
)
def test_a_report_of_more_rejected_than_judged_is_refused(sent: dict[str, float]) -> None:
    """Added up, it would make a mean below 0, which no later start of the run could read."""
    with pytest.raises(msgspec.ValidationError, match="are more than"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=NoiseFloor)
