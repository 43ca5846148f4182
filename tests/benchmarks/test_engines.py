"""benchmarks.engines measures a real engine through the protocol, and names what is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines import main
from benchmarks.engines.main import Sizes, cpu_seconds, measure
from benchmarks.tiny_models import random_qwen3

NUMBERS = {
    "ready_s",
    "plain_tokens_per_s",
    "drafted_tokens_per_s",
    "drafts_accepted_share",
    "cpu_us_per_row_step",
    "client_us_per_row_step",
    "score_latency_ms",
    "scored_tokens_per_s",
    "pause_ms",
    "resume_ms",
    "stage_ms",
    "install_ms",
}


def test_all_numbers_of_an_engine_are_measured(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    random_qwen3(1, 64, max_length=256).save_pretrained(tmp_path)
    tensors = dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    sizes = Sizes(rows=2, length=12, rounds=1)
    found = asyncio.run(measure("torch", str(tmp_path), tensors, sizes))
    assert found.keys() == NUMBERS
    assert all(value > 0 for name, value in found.items() if name != "drafts_accepted_share")


def test_cpu_time_only_grows() -> None:
    before = cpu_seconds()
    sum(range(100_000))
    assert cpu_seconds() > before > 0


def test_ratios_are_over_torch_and_missing_engines_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def numbers(value: float) -> dict[str, dict[str, float]]:
        return {model: {"pause_ms": value, "accepted": 0.0} for model in main.MODELS}

    found = {"torch": numbers(2.0), "sglang": numbers(3.0)}
    monkeypatch.setattr(main, "_measure_all", lambda *_, **__: (found, {"vllm": "not installed"}))
    file = tmp_path / "engines.json"
    assert main.main(["--quick", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "sglang_vs_torch_4M_pause_ms" in said.out
    assert "MISSING: vllm was not measured: not installed" in said.err
    assert json.loads(file.read_text())["ratios"] == {
        "sglang_vs_torch_4M_pause_ms": 1.5,
        "sglang_vs_torch_host_pause_ms": 1.5,
    }


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["--engine", "torch,trt"])
