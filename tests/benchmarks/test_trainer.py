"""What the trainer's benchmark makes of its measurements."""

from __future__ import annotations

import pytest

from benchmarks.trainer.__main__ import Workload, costs_of, of_targets, ratios_of

WORKLOAD = Workload("w", 100, hidden=192, layers=2, prompt=3, longest=8, tokens=1)


def test_costs_count_real_tokens_and_a_shared_prompt_once() -> None:
    group = {"prompt": [1, 2, 3], "responses": [[4] * 5, [5] * 2]}
    costs = costs_of(WORKLOAD, [group])
    assert (costs.tokens, costs.padded) == (3 + 5 + 3 + 2, 2 * (3 + 5))
    layer = 192 * 64 * (2 * 3 + 2 * 1) + 3 * 192 * 512
    pairs = 9 / 2 + (15 + 25 / 2) + (6 + 4 / 2)
    expected = 2 * (6 * layer * (3 + 5 + 2) + 12 * 3 * 64 * pairs) + 6 * 192 * 100 * 7
    assert costs.flops == pytest.approx(expected)


def test_ratios_leave_the_first_step_out_and_the_worst_speed_counts() -> None:
    def result(seconds: list[float], peak: int) -> dict[str, object]:
        return {"seconds": seconds, "peak_bytes": peak}

    costs = {"flops": 8.0, "tokens": 1, "padded": 1}
    slow = {"costs": costs, "asyncrl": result([9, 2, 2], 3), "plain": result([99, 6, 6], 10)}
    fast = {"costs": costs, "asyncrl": result([9, 1], 3), "plain": result([9, 2], 4)}
    ratios = ratios_of("100m", slow, 5.0) | ratios_of("vocabulary", fast, 5.0)
    assert ratios["mfu_vs_peak_100m"] == pytest.approx(0.8)
    found = of_targets(ratios)
    assert found == {
        "vs_transformers": 2.0,
        "mfu_vs_peak": pytest.approx(0.8),
        "peak_memory_vs_plain": 0.75,
    }
    assert ratios_of("small", {"costs": costs}, 5.0) == {}
