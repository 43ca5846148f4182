"""The table of shipped configurations on stand-in GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.run_config import load_config
from benchmarks import gpu_plan
from benchmarks.gpu_plan import CHART, MACHINES, ROOT, Machine, Row, judge, ratios_of, rows


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows()


def test_every_shipped_configuration_fits_what_it_is_written_for(found: list[Row]) -> None:
    assert [row.name for row in found if row.is_unfit] == []
    assert ratios_of(found) == {"shipped": len(found), "unfit_shipped": 0}
    names = {row.name for row in found}
    paths = [*(ROOT / "examples").rglob("*.yaml"), *(ROOT / CHART).glob("*.yaml")]
    missing = {str(path.relative_to(ROOT)) for path in paths} - names
    assert missing == {f"{CHART}/monitoring.yaml", f"{CHART}/rdma.yaml"}, "they ask for no GPU"
    assert names >= {"asyncrl/initialise/templates/run.yaml", "docker/compose.gpu.yaml"}


def test_the_first_example_shares_one_gpu_of_24_gb(found: list[Row]) -> None:
    (row,) = [row for row in found if row.name == "examples/arithmetic.yaml"]
    assert row.written_for == "1x24"
    assert row.verdicts[0].text.startswith("GPU 0 (24 GiB): trainer ")
    assert [one.machine for one in row.verdicts[1:]] == ["1x24", "1x80", "8x80", "8x141"]
    assert "GPU 0" not in row.verdicts[-1].text, "with eight each has its own"


@pytest.mark.parametrize(
    ("name", "changes", "machine", "said"),
    [
        # What the chart's example for 8 GPUs had before: a 7B on one GPU of the trainer.
        ("examples/7b-8gpus.yaml", ["trainer.ranks=1", "trainer.sharding=optimizer"], MACHINES[2],
         "a training step needs about"),
        ("examples/7b-8gpus.yaml", [], MACHINES[1], "8 GPUs are needed"),
        ("examples/7b-8gpus.yaml", ["engine.dtype=float32", "engine.max_model_len=400000"],
         Machine(8, 80), "a training step"),
        ("examples/arithmetic.yaml", ["engine.kind=vllm", "engine.vllm.kv_cache_gib=30"],
         MACHINES[0], "is too small for the trainer and a generator"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_noticed(
    name: str, changes: list[str], machine: Machine, said: str
) -> None:
    verdict = judge(load_config(ROOT / name, changes), machine)
    assert not verdict.fits
    assert said in verdict.text


def test_generators_need_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "examples/7b-8gpus.yaml")
    assert judge(config, Machine(8, 80)).fits
    monkeypatch.setitem(gpu_plan.SHAPES, "qwen2.5-math-7b", gpu_plan.SHAPES["qwen2.5-32b"])
    trained = load_config(ROOT / "examples/7b-8gpus.yaml", ["trainer.device=cpu"])
    assert judge(config, Machine(8, 141)).fits is False
    assert not judge(trained, Machine(8, 24)).fits


def test_the_exit_code_says_whether_all_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--json", str(tmp_path / "plan.json")]
    assert gpu_plan.main(arguments) == 0
    monkeypatch.setitem(gpu_plan.WRITTEN_FOR, "examples/7b-8gpus.yaml", Machine(1, 24))
    assert gpu_plan.main(arguments) == 1
