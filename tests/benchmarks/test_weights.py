from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.weights import (
    make_model,
    measure,
    print_remote_table,
    print_table,
    ratios_of,
    remote_ratios,
)


def test_every_part_is_measured_and_the_worse_data_type_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path, hidden=64, layers=1)
    raw = {"bfloat16": measure(path, torch.bfloat16, 2)}
    one = raw["bfloat16"]
    memory = one["memory_bytes"]
    assert memory["before"]["staged"] == pytest.approx(2 * one["engine_bytes"], rel=0.01)
    assert memory["now"]["staged"] == pytest.approx(one["engine_bytes"], rel=0.01)
    assert memory["now"]["published"] == 2 * memory["now"]["staged"]
    pause, floor = (one["milliseconds"][a][b] for a, b in (("now", "pause"), ("floor", "memcpy")))
    ratios = ratios_of(raw)
    assert ratios["install_pause_vs_memcpy"] == pytest.approx(pause / floor)
    worse = {"milliseconds": one["milliseconds"] | {"floor": {"memcpy": floor / 2}}}
    assert ratios_of(raw | {"float32": worse})["install_pause_vs_memcpy"] == pytest.approx(
        2 * pause / floor
    )
    print_table(raw, ratios)
    assert "install_pause_vs_memcpy" in capsys.readouterr().out


def test_a_ratio_without_measurements_is_left_out() -> None:
    floor = {"memcpy": 2.0}
    way = {"pause": 4.0, "stage": 6.0, "step": 1.0}
    slower = {"floor": floor, "before": way, "now": way | {"step during stage": 3.0}}
    fast = {"floor": floor, "before": way, "now": way}
    assert ratios_of({"a": {"milliseconds": slower}, "b": {"milliseconds": fast}}) == {
        "install_pause_vs_memcpy": 2.0,
        "before_pause_vs_memcpy": 2.0,
        "stage_vs_memcpy": 3.0,
        "step_during_stage": 3.0,
    }
    assert "step_during_stage" not in ratios_of({"b": {"milliseconds": fast}})


def test_the_pause_of_vllm_counts_against_the_same_copy(capsys: pytest.CaptureFixture[str]) -> None:
    way = {"stage": 30.0, "pause": 3.0}
    raw = {"milliseconds": {"now": way, "before": {"pause": 25.0}, "floor": {"memcpy": 2.0}}}
    ratios = remote_ratios("vllm", raw)
    assert ratios == {
        "vllm_install_pause_vs_memcpy": 1.5,
        "vllm_before_pause_vs_memcpy": 12.5,
        "vllm_stage_vs_memcpy": 15.0,
    }
    print_remote_table("vllm", raw, ratios)
    assert "vllm now       stage 30.0 ms  pause 3.0 ms" in capsys.readouterr().out
    del raw["milliseconds"]["before"]  # as of SGLang
    assert remote_ratios("sglang", raw) == {
        "sglang_install_pause_vs_memcpy": 1.5,
        "sglang_stage_vs_memcpy": 15.0,
    }
