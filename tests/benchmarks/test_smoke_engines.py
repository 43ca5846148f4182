"""The benchmark of engines goes its whole way with each real one, beside the torch engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_sglang import REAL_SGLANG
from served_vllm import REAL_VLLM
from smokes import smoke


@pytest.mark.parametrize(
    "engine", [pytest.param("vllm", marks=REAL_VLLM), pytest.param("sglang", marks=REAL_SGLANG)]
)
def test_an_engine_beside_torch(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = smoke("engines", tmp_path / "out.json", capsys, "--engine", f"torch,{engine}")
    assert not written["raw"]["missing"]
    assert f"{engine}_vs_torch_host_ready_s" in written["ratios"]
