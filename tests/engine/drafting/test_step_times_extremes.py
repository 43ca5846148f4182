"""Step times stay finite whatever steps are fed: a division by 0 would end a generator."""

from __future__ import annotations

import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.drafting.step_times import StepTimes

sizes = st.integers(1, 1 << 20)
seconds = st.floats(5e-324, 1e300) | st.sampled_from([5e-324, 1e-300, 1e-9, 1e-3, 1e9, 1e300])
steps = st.tuples(sizes, sizes, st.integers(0, 1 << 40), st.booleans(), seconds)


def check(times: StepTimes, rows: int, context: int) -> None:
    for asked in (False, True):
        for optimistic in (False, True):
            curve = times.curve(rows, 64, rows=rows, context=context, asked=asked,
                                optimistic=optimistic)  # fmt: skip
            assert not np.isnan(curve).any()
            assert (np.diff(curve) >= 0).all() or not np.isfinite(curve).all()
    assert not math.isnan(times.asking(rows))


@settings(max_examples=60)
@given(st.lists(st.tuples(steps, st.integers(1, 12)), min_size=1, max_size=12))
def test_extreme_steps_end_nothing(
    some: list[tuple[tuple[int, int, int, bool, float], int]],
) -> None:
    times = StepTimes()
    for (tokens, rows, context, asked, taken), repeats in some:
        for _ in range(repeats):
            times.observe(tokens=tokens, rows=rows, context=context, asked=asked, seconds=taken)
        check(times, min(rows, 1 << 10), context)


def test_evidence_may_fade_to_nothing() -> None:
    """220,000 steps of one size after varied ones: the square of a slope becomes 0."""
    draw = random.Random(1)
    times = StepTimes()
    for _ in range(3000):
        rows, drafts = draw.randint(1, 16), draw.randint(0, 3)
        taken = 1e-3 * (1 + rows * 0.05 + draw.random() * 0.1)
        times.observe(tokens=rows * (1 + drafts), rows=rows, context=rows * 20,
                      asked=drafts > 0, seconds=taken)  # fmt: skip
    for _ in range(220_000):
        times.observe(tokens=4, rows=4, context=80, asked=False, seconds=1e-3)
    check(times, 4, 80)
