import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.monitoring.metrics.occupancy import SlotPiece, slot_shares
from asyncrl.monitoring.report.lanes import kinds_legend, slot_strip, use_in_slices
from asyncrl.monitoring.report.plots import SLICES, Box


def test_each_slice_has_the_mean_of_its_own_time():
    pieces = [
        SlotPiece(0.0, 1.0, 4, {"primary": 4.0}),
        SlotPiece(1.0, 3.0, 4, {"run_ahead": 2.0}),
    ]
    assert use_in_slices(pieces, 0.0, 4.0, 2) == [
        {"primary": 0.5, "run_ahead": 0.25},
        {"run_ahead": 0.5},
    ]
    assert use_in_slices(pieces, 3.0, 5.0, 2) == [{}, {}]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 4)), max_size=20))
def test_slices_add_up_to_the_shares_of_the_whole(some):
    pieces, at = [], 0.0
    for length, primary, ahead in some:
        used = {"primary": float(primary), "run_ahead": float(ahead)}
        pieces.append(SlotPiece(at, at + length, 8, used))
        at += length
    if not pieces:
        return
    slices = use_in_slices(pieces, 0.0, at, 7)
    shares = slot_shares(pieces, 0.0, at)
    for use in ("primary", "run_ahead"):
        mean = sum(one.get(use, 0.0) for one in slices) / 7
        assert mean == pytest.approx(shares.get(use, 0.0))


def test_a_strip_says_its_numbers_and_draws_nothing_where_nothing_is_known():
    pieces = [SlotPiece(10.0, 20.0, 4, {"primary": 3.0})]
    drawn = slot_strip(pieces, (0.0, 20.0), Box(100.0, 0.0, 900.0, 20.0), origin=0.0)
    assert drawn.count("due samples: 3.0 of 4 slots") == SLICES // 2
    assert "empty: 25%" in drawn
    assert 'class="k-generating"' in drawn
    nothing = slot_strip([], (0.0, 20.0), Box(100.0, 0.0, 900.0, 20.0), origin=0.0)
    assert "path" not in nothing


def test_the_legend_has_environments_if_samples_waited_for_them() -> None:
    def legend(**used: float) -> str:
        return str(kinds_legend({}, {"generator-0": [SlotPiece(0.0, 1.0, 4, used)]}))

    assert "empty, samples wait for environments" in legend(environment=2.0)
    assert "environments" not in legend(primary=2.0)
