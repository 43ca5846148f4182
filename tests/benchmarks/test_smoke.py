"""Every benchmark starts and goes its whole way: `--smoke`, in this process where it can."""

from __future__ import annotations

from pathlib import Path

import pytest
from smokes import (
    ELSEWHERE,
    IN_THREADS,
    LIGHT,
    PROCESSES,
    ROOT,
    benchmark_names,
    smoke,
)


def test_every_benchmark_has_a_smoke_that_is_run_or_a_reason() -> None:
    run = (*LIGHT, *IN_THREADS, *PROCESSES)
    assert sorted((*run, *ELSEWHERE)) == benchmark_names()


def test_make_bench_runs_every_benchmark() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (named,) = (line.split()[2:] for line in lines if line.startswith("BENCHMARKS :="))
    assert sorted(named) == benchmark_names()


@pytest.mark.usefixtures("_forked_runs")
@pytest.mark.parametrize("name", LIGHT)
def test_a_benchmark_goes_its_whole_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = smoke(name, tmp_path / "out.json", capsys)
    assert written["ratios"]
