"""The benchmark of turns tells turns from tokens, and plays what it measures outside the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.protocol import GenerateRequest
from benchmarks import turns


def test_what_turns_cost_is_told_from_what_tokens_cost() -> None:
    found = {
        "turn_8_ms": 100.0,
        "turn_8_first_token_ms": 50.0,
        "turn_128_ms": 132.0,
        "turn_128_first_token_ms": 60.0,
        "turn_control_ms": 120.0,
        "turn_control_first_token_ms": 65.0,
    }
    assert turns.ratios_of("vllm", found) == pytest.approx(
        {
            "vllm_turn_cost_growth": 1.1,
            "vllm_context_growth": 1.2,
            "vllm_whole_growth": 1.32,
            "vllm_decode_context_growth": 1.1,
        }
    )


def test_outside_the_engine_all_turns_are_played_and_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Early and late turns are of the same samples, and each sends all tokens before it."""
    asked: list[GenerateRequest] = []
    generate = turns.ReadyEngine.generate

    def noted(self: Any, request: GenerateRequest) -> Any:
        asked.append(request)
        return generate(self, request)

    monkeypatch.setattr(turns.ReadyEngine, "generate", noted)
    found = asyncio.run(turns.measure_outside(4, 8, 1))
    assert all(value > 0 for value in found.values())
    played = {4: asked[:5], 16: asked[5:]}
    for number, requests in played.items():
        *drawn, verified = requests
        assert len(drawn) == number
        assert verified.kept is not None
        assert int((~verified.kept.observed).sum()) == number * turns.TOKENS
        assert [one.kept for one in drawn] == [None] * number
        lengths = [len(one.prefix_tokens) for one in drawn]
        assert lengths == sorted(set(lengths))
        assert [one.turn_start for one in drawn] == lengths


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = turns.measure_outside
    monkeypatch.setattr(turns, "measure_outside", lambda *_: whole(8, 128, 1))
    path = tmp_path / "out.json"
    turns.main(["--quick", "--part", "outside", "--json", str(path)])
    written = json.loads(path.read_text())
    outside = written["raw"]["outside"]
    growth = outside["turn_128_cpu_ms"] / outside["turn_8_cpu_ms"]
    assert written["ratios"] == {"outside_turn_cost_growth": growth}
    assert written["raw"]["engines"] == {}
