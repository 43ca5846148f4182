from __future__ import annotations

import pytest

from benchmarks.weights_broadcast import measure_receivers, ratios_of, table_of


@pytest.mark.usefixtures("_forked_runs")
def test_receivers_are_measured_by_broadcast_and_by_file() -> None:
    one = measure_receivers(1, 2_000_000, 1)
    assert one["broadcast"] == one["each"]["broadcast"][2] > 0
    assert one["file"] == one["each"]["file"][2] > 0
    raw = {
        "nbytes": 10,
        "memcpy_seconds": 0.25,
        "one": {"broadcast": 2.0, "file": 0.5},
        "four": {"broadcast": 3.0, "file": 0.5},
    }
    ratios = ratios_of(raw)
    assert ratios == {
        "broadcast_vs_memcpy": 8.0,
        "broadcast4_vs_one": 1.5,
        "broadcast_vs_file": 6.0,
    }
    assert table_of(raw).row_count == 5
