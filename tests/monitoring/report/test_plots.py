import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.monitoring.records.spans import Span
from asyncrl.monitoring.report.lanes import clock_label, slice_shares
from asyncrl.monitoring.report.markup import Markup, element, escape
from asyncrl.monitoring.report.plots import MAX_POINTS, Series, bar_plot, compact, line_plot
from asyncrl.monitoring.report.series import (
    difference_interval,
    growth,
    less,
    smooth,
    thin,
    ticks,
)
from asyncrl.monitoring.terminal.formatting import (
    UNKNOWN,
    count,
    duration,
    number,
    percent,
    sparkline,
)
from asyncrl.wire.records.evaluations import independent_trials, wilson

values = st.lists(
    st.none() | st.floats(-1e9, 1e9, allow_nan=False, allow_subnormal=False),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(values)
def test_plots_stay_inside_their_frame_whatever_the_numbers(some):
    x = [float(i) for i in range(len(some))]
    for plot in (
        line_plot("t", x, [Series("a", some)]),
        line_plot("t", x, [Series("a", some)], y_limits=(0.0, None)),
        bar_plot("t", x, [Series("a", some), Series("b", some[::-1])]),
    ):
        assert isinstance(plot, Markup)
        assert "nan" not in plot
        for number_ in re.findall(r'cx="(-?[\d.]+)"', plot):
            assert 0 <= float(number_) <= 520


def test_gaps_break_a_line_and_lone_points_are_dots():
    plot = line_plot("t", [0, 1, 2, 3, 4], [Series("a", [1.0, 2.0, None, 3.0, None])])
    (path,) = re.findall(r'<path d="([^"]+)"', plot)
    assert path.count("M") == 2
    assert plot.count('r="2.5"') == 1


def test_nothing_to_plot_says_so():
    assert "Nothing recorded." in line_plot("t", [0.0], [Series("a", [None])])
    assert "Nothing recorded." in bar_plot("t", [], [Series("a", [])])


def test_long_runs_are_thinned():
    n = 10_000
    plot = line_plot("t", list(range(n)), [Series("a", [0.5] * n)])
    assert plot.count("<title>") == MAX_POINTS


def test_markup_escapes_everything_that_is_not_markup():
    assert element("p", "<&>", 3, None, ["x", element("b", "y")], title='"') == (
        '<p title="&quot;">&lt;&amp;&gt;3x<b>y</b></p>'
    )
    assert element("rect", x=1.0, y=2.345) == '<rect x="1" y="2.35"/>'
    assert escape("\x00\ud800") == "\u2400\ufffd"


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 12))
def test_ticks_are_inside_and_not_too_many(low, length, about):
    found = ticks(low, low + length, about)
    assert len(found) <= 2 * about + 2
    assert all(low - 1e-6 * length - 1e-9 <= t <= low + length * 1.000001 + 1e-9 for t in found)


def test_cumulative_numbers_become_growth_also_over_a_restart_and_a_gap():
    assert growth([10, 25, 5, None, 9, 12]) == [10, 15, 5, None, None, 3]


def test_what_parts_leave_of_a_whole_is_never_negative():
    assert less([10.0, None, 5.0, 4.0], [3.0, 1.0, 9.0, None], [1.0, 1.0, 0.0, 1.0]) == [
        6.0, None, 0.0, 3.0,
    ]  # fmt: skip


def test_smoothing_begins_at_the_first_value_and_keeps_gaps():
    out = smooth([1.0, None, 1.0, 1.0])
    assert out[1] is None
    assert out[0] == out[2] == out[3] == pytest.approx(1.0)


@given(values, st.integers(1, 10))
def test_thinning_keeps_the_number_of_points_small(some, most):
    assert len(thin(some, most)) == min(len(some), most)


def test_intervals_agree_with_published_ones():
    # Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    # Newcombe (1998), part two, method 10: 9 of 10 less 3 of 10 gives 0.1705 to 0.8090.
    assert difference_interval(0.3, 0.9, (10, 10)) == pytest.approx((0.1705, 0.8090), abs=5e-5)
    with pytest.raises(ValueError, match="trial"):
        wilson(0.5, 0)


def test_samples_of_one_prompt_stand_for_fewer_independent_ones():
    share, variance = 0.4, 0.4 * 0.6
    alike = independent_trials(share, math.sqrt(variance / 62), 62, 248)
    assert alike == pytest.approx(62)
    assert independent_trials(share, math.sqrt(variance / 248), 62, 248) == pytest.approx(248)
    assert independent_trials(share, math.sqrt(variance / 900), 62, 248) == 248
    assert independent_trials(1.0, 0.0, 62, 248) == 62
    assert independent_trials(share, None, 1, 8) == 1
    assert independent_trials(share, 0.3, 62, 62) == 62


def test_slices_share_out_time():
    spans = [Span("training", 0.0, 1.5), Span("waiting", 1.5, 4.0)]
    assert slice_shares(spans, 0.0, 4.0, 4) == [
        {"training": 1.0}, {"training": 0.5, "waiting": 0.5}, {"waiting": 1.0}, {"waiting": 1.0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (1500, "1.5k"), (2e6, "2M"), (3e-5, "3e-5"), (1.25e-6, "1.25e-6")],
)
def test_ticks_are_short(value, text):
    assert compact(value) == text


def test_numbers_as_people_read_them():
    assert [duration(s) for s in (0.44, 9.97, 59.6, 200, 18_420, 200_000)] == [
        "0.4 s", "10 s", "1 min 00 s", "3 min 20 s", "5 h 07 min", "2 d 7 h",
    ]  # fmt: skip
    assert [count(n) for n in (950, 7512, 1.25e6, 3e9)] == ["950", "7,512", "1.25M", "3G"]
    assert percent(0.421) == "42%"
    assert {number(None), percent(math.nan), count(None), duration(None)} == {UNKNOWN}
    assert sparkline([0.0, 0.5, math.nan, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert [clock_label(s, 1) for s in (5, 200, 3900)] == ["5 s", "3:20", "1:05:00"]
