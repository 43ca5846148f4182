"""The chi-square test of the whole loop."""

from __future__ import annotations

import numpy as np
from whole_loop.statements import ALARM, compare


def test_exact_draws_pass_at_the_nominal_rate_and_a_small_shift_fails() -> None:
    """A shift of 0.02 in 20,000 samples fails."""
    rng = np.random.default_rng(1)
    expected = {0: {"a": 0.5, "b": 0.3, "c": 0.2, "never": 0.0}}

    def draw(samples: int, probabilities: list[float]) -> list[tuple[int, str]]:
        return [(0, str(x)) for x in rng.choice(["a", "b", "c"], samples, p=probabilities)]

    p_values = [compare(draw(500, [0.5, 0.3, 0.2]), expected).p_value for _ in range(400)]
    assert abs(np.mean([p < 0.1 for p in p_values]) - 0.1) < 0.07
    assert compare(draw(20_000, [0.52, 0.28, 0.2]), expected).p_value < ALARM
    assert compare([(0, "never")], expected).p_value == 0.0
