"""The benchmark of deliveries runs every path, and each ends with a trajectory that is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.wire.transport.outbox import PART_BYTES
from benchmarks.delivery import main
from benchmarks.delivery.main import PATHS


def test_it_measures_every_path_and_writes_the_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = main.Effort(rounds=2, megabytes=0.5, lengths=(24_000, 3000))
    monkeypatch.setattr(main, "QUICK", effort)
    file = tmp_path / "delivery.json"
    main.main(["--quick", "--part", "paths", "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["name"] == "delivery"
    long, short = written["raw"]["lengths"]
    assert long["size"] > 2 * PART_BYTES, "it travels in parts"
    assert short["size"] < PART_BYTES
    for one in (long, short):
        assert set(one["cpu_us"]) == set(PATHS)
        assert min(*one["cpu_us"].values(), *one["stage_us"].values()) > 0
        rank = one["rank"]
        assert min(rank["wall_us"], rank["main_us"], rank["bytes_each"]) > 0
        assert rank["io_us"] >= 0, "less than a tick of the kernel's clock"
    assert {"delivery_whole_over_curve_3000", "delivery_ranks_for_1000_gpus_3000"} < set(
        written["ratios"]
    )


def test_it_measures_an_intake_over_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "QUICK", main.Effort(rounds=1, megabytes=0.1, lengths=(3000,)))
    monkeypatch.setattr(main, "WAYS", {"groups, plain": main.WAYS["groups, plain"]})
    file = tmp_path / "delivery.json"
    main.main(["--quick", "--part", "intake", "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    (row,) = written["raw"]["intake"]
    assert min(row["wall_us"], row["main_us"]) > 0
    assert row["io_us"] >= 0
    assert written["ratios"]["intake_mb_per_s_groups_plain_3000"] > 0
