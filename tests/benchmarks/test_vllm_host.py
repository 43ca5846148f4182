"""The benchmark of what the generator costs vLLM: how rounds become numbers, and one tiny run."""

from __future__ import annotations

import pytest

from benchmarks.vllm_host import main
from benchmarks.vllm_host.sides import Spent


def spent(wall: float, client: float, **hooks: float) -> Spent:
    return Spent(100, wall, client, 1.0, hooks)


def test_ratios_are_medians_of_pairs_and_costs_are_differences() -> None:
    ours = [spent(wall, 4e-4, draw=5e-4, table=1e-4) for wall in (1.0, 2.0, 8.0)]
    plain = [spent(wall, 1e-4, draw=3e-4) for wall in (0.5, 2.0, 8.8)]
    assert main.speed_ratio(ours, plain) == pytest.approx(1.0)
    costs = main.host_costs(ours, plain)
    assert costs == pytest.approx({"client": 3.0, "table": 1.0})
