"""The benchmark of the torch engine's host measures a real core and names its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import torch_host


def test_the_parts_are_those_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_host, "ROWS", 16)
    monkeypatch.setattr(torch_host, "TOKENS", 24)
    torch_host.main(["--quick", "--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["name"] == "torch_host"
    parts = written["raw"]["us_per_row_step"]
    assert set(parts) == {"forward", "draw", "host"}
    assert all(value > 0 for value in parts.values())
    assert written["ratios"] == {"torch_host_us_per_row_step": parts["host"]}
