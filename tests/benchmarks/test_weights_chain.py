from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.wire.weights.chain.source import PublishedVersions
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.weights_chain import (
    _Measurement,
    ratios_of,
    seconds_by_arithmetic,
    share_of,
    tables,
)
from benchmarks.weights_nodes import Link, nodes


@pytest.mark.usefixtures("_forked_runs")
def test_every_receiver_of_a_small_chain_is_measured() -> None:
    run = _Measurement(2_000_000, 1)
    try:
        with nodes(2, Link(encrypted=False)) as chain:
            whole = run.seconds(chain, 2)
            delta = run.seconds(chain, 1, deltas=True)
    finally:
        run.close()
    assert whole["bytes"] == pytest.approx([2_000_000] * 2, rel=0.001)
    assert 0.025 < delta["bytes"][0] / 2_000_000 < 0.035
    assert whole["seconds"] == whole["each"][2] > 0


def test_the_share_is_that_of_what_changed(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 20, dtype=torch.bfloat16)
    versions = PublishedVersions()
    with WeightPublisher(tmp_path, "test") as publisher:
        before = publisher.publish([("w", weights)], 0)
        weights.view(torch.int16)[::100] = 1
        after = publisher.publish([("w", weights)], 1)
        for manifest in (before, after):
            versions.add(manifest)
        assert share_of(versions, before, after) == pytest.approx(0.01, rel=0.01)


def test_ratios_and_arithmetic() -> None:
    times = {
        "one": 2.0, "one_plain": 1.0, "one_delta": 0.2, "four": 5.0, "one_paced": 8.0,
        "four_paced": 8.8,
    }  # fmt: skip
    raw: dict[str, Any] = {n: {"seconds": t, "bytes": [10]} for n, t in times.items()}
    one = {"parameters": 1, "standard_deviation": 0.02}
    raw |= {
        "nbytes": 10,
        "memcpy_seconds": 0.5,
        "paced_bytes_per_second": 1.0,
        "deltas": {"a": one | {"shares": [0.1, 0.2]}, "b": one | {"shares": [0.15]}},
        "arithmetic": seconds_by_arithmetic(0.2),
    }
    ratios = ratios_of(raw)
    assert ratios == {
        "tcp_vs_memcpy": 4.0,
        "tcp_plain_vs_memcpy": 2.0,
        "tree4_vs_one": pytest.approx(1.1),
        "tree4_vs_one_unpaced": 2.5,
        "delta_vs_whole_seconds": pytest.approx(0.1),
        "delta_bytes_share": 0.2,
    }
    first = raw["arithmetic"][0]
    assert (first["model"], first["gigabits"]) == ("7B", 10)
    assert first["one_node_seconds"] == pytest.approx(11.2)
    assert 11.2 < float(first["sixteen_nodes_seconds"]) < 11.3
    assert [one.row_count for one in tables(raw)] == [7, 2, 6]
