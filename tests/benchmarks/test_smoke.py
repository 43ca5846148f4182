"""Every benchmark starts and goes its whole way: `--smoke`, in this process where it can."""

from __future__ import annotations

from pathlib import Path

import pytest
from smokes import LIGHT, smoke


@pytest.mark.parametrize("name", LIGHT)
def test_a_benchmark_goes_its_whole_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = smoke(name, tmp_path / "out.json", capsys)
    assert written["ratios"] or name == "exactness_loop"
