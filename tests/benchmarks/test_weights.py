from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.weights import make_model, measure, ratios_of, remote_ratios, table_of


def test_every_part_is_measured_and_the_worse_data_type_counts(tmp_path: Path) -> None:
    path = make_model(tmp_path, hidden=64, layers=1)
    raw = {"bfloat16": measure(path, torch.bfloat16, 2)}
    one = raw["bfloat16"]
    memory, times = one["memory_bytes"], one["milliseconds"]
    assert memory["staged"] == pytest.approx(one["engine_bytes"], rel=0.01)
    assert memory["published"] == 2 * memory["staged"]
    ratio = times["pause"] / times["memcpy"]
    assert ratios_of(raw)["install_pause_vs_memcpy"] == pytest.approx(ratio)
    worse = {"milliseconds": times | {"memcpy": times["memcpy"] / 2}}
    found = ratios_of(raw | {"float32": worse})["install_pause_vs_memcpy"]
    assert found == pytest.approx(2 * ratio)
    Console().print(table_of(raw))


def test_a_ratio_without_measurements_is_left_out() -> None:
    way = {"pause": 4.0, "stage": 6.0, "step": 1.0, "memcpy": 2.0}
    slower = way | {"step during stage": 3.0}
    assert ratios_of({"a": {"milliseconds": slower}, "b": {"milliseconds": way}}) == {
        "install_pause_vs_memcpy": 2.0,
        "stage_vs_memcpy": 3.0,
        "step_during_stage": 3.0,
    }
    assert "step_during_stage" not in ratios_of({"b": {"milliseconds": way}})


def test_the_pause_of_vllm_counts_against_the_same_copy() -> None:
    raw = {"milliseconds": {"stage": 30.0, "pause": 3.0, "memcpy": 2.0}}
    assert remote_ratios("vllm", raw) == {
        "vllm_install_pause_vs_memcpy": 1.5,
        "vllm_stage_vs_memcpy": 15.0,
    }
