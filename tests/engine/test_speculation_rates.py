"""Never slower than no drafting, nearly as fast as knowing everything: on simulated engines.

Rates are of expected tokens and noise-free seconds; the planner sees 5% noise and 1% stalls. Seeds
are fixed, so these tests either hold or do not.
"""

from __future__ import annotations

import pytest
from simulated_steps import Drafter, Seconds, World, cpu, gpu, run, small

from engine.speculation import DraftPlanner

MIXED = ((0.5, 0.98), (0.3, 0.7), (0.2, 0.0))
POOR = ((0.5, 0.5), (0.5, 0.2))


def _planner() -> DraftPlanner:
    return DraftPlanner(max_step_tokens=8192, max_draft_tokens=16)


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 128, 256])
@pytest.mark.parametrize("kinds", [MIXED, POOR], ids=["mixed", "poor"])
@pytest.mark.parametrize("seconds", [cpu, gpu, small])
def test_rates(seconds: Seconds, kinds: tuple[tuple[float, float], ...], rows: int) -> None:
    rates = run(World(seconds, Drafter(kinds)), _planner(), rows, 1500)
    assert rates.planned >= 0.97 * rates.plain
    assert rates.planned >= 0.93 * rates.best
