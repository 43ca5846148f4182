"""Never slower than no drafting, nearly as fast as knowing everything: on simulated engines.

Rates are of expected tokens and noise-free seconds; the planner sees 5% noise and 1% stalls. Seeds
are fixed, so these tests either hold or do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated_steps import Drafter, Seconds, SimulatedEngine, cpu, gpu, run, small

from asyncrl.engine.drafting.planner import DraftPlanner

MIXED = ((0.5, 0.98), (0.3, 0.7), (0.2, 0.0))
POOR = ((0.5, 0.5), (0.5, 0.2))


def _planner() -> DraftPlanner:
    return DraftPlanner(max_step_tokens=8192, max_draft_tokens=16)


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("kinds", [MIXED, POOR], ids=["mixed", "poor"])
@pytest.mark.parametrize("seconds", [cpu, gpu, small])
def test_rates(seconds: Seconds, kinds: tuple[tuple[float, float], ...], rows: int) -> None:
    rates = run(SimulatedEngine(seconds, Drafter(kinds)), _planner(), rows, 400)
    assert rates.planned >= 0.97 * rates.plain
    assert rates.planned >= 0.9 * rates.best


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("seconds", [cpu, gpu, small])
def test_the_first_steps_are_not_wasted(seconds: Seconds, rows: int) -> None:
    rates = run(SimulatedEngine(seconds), _planner(), rows, 40)
    assert rates.planned >= 0.95 * rates.plain


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_estimates_that_mislead_are_seen_through(rows: int) -> None:
    """All say 0.99; three in ten are accepted."""

    def overconfident(truth: Any) -> Any:
        return np.full_like(truth, 0.99) - 1e-4 * np.tile(np.arange(16), len(truth) // 16)

    rates = run(
        SimulatedEngine(cpu, Drafter(((1.0, 0.3),), estimate=overconfident)), _planner(), rows, 1000
    )
    assert rates.planned >= 0.95 * rates.plain, "learning included"


def test_a_machine_that_becomes_slow_and_drafts_that_become_bad_are_followed() -> None:
    planner, rows = _planner(), 8
    run(SimulatedEngine(cpu), planner, rows, 600)
    slower = run(SimulatedEngine(lambda t, r, c: 2 * cpu(t, r, c)), planner, rows, 600)
    assert slower.planned >= 0.97 * slower.plain
    worse = run(SimulatedEngine(cpu, Drafter(((1.0, 0.3),))), planner, rows, 600)
    assert worse.planned >= 0.94 * worse.plain, "600 steps include the time to notice"
    after = run(SimulatedEngine(cpu, Drafter(((1.0, 0.3),))), planner, rows, 600)
    assert after.planned >= 0.97 * after.plain
