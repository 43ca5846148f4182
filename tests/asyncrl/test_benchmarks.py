"""benchmarks.rollout in miniature: its JSON is complete, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import ensure_builtin_model
from asyncrl.tasks.warm_start import WarmStart
from benchmarks import rollout
from benchmarks.report import write_json
from benchmarks.widen import widen

TINY = WarmStart(
    hidden_size=32,
    intermediate_size=32,
    heads=1,
    head_dim=32,
    steps=4,
    batch_size=4,
    dev_problems=8,
    expected=(0.0, 1.0),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_builtin_model(tmp_path_factory.mktemp("cache"), None, TINY))


def test_the_json_has_machine_versions_raw_and_flat_ratios(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "SETTLE_SECONDS", 0.0)
    task = load_task(TaskConfig(train_size=64), model, 0)
    plan = rollout.Plan(rows=(2,), repeats=2, seconds=0.01)
    findings = rollout.measure(["torch"], model, task, plan)
    assert not findings.failed
    file = tmp_path / "new" / "rollout.json"
    write_json(file, "rollout", findings.raw(), findings.ratios())
    read = json.loads(file.read_text())
    assert {"name", "date", "machine", "versions", "raw", "ratios"} <= read.keys()
    assert read["machine"]["cores"] >= 1
    assert "torch" in read["versions"]
    assert read["ratios"].keys() == {"torch_b2_drafted_vs_plain", "torch_b2_first_epoch_vs_plain"}
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in read["ratios"].values())
    raw = read["raw"]["torch_b2"]
    assert [len(raw[side]) for side in ("first_epoch", "plain", "drafted")] == [2, 2, 2]
    for plain, drafted in zip(raw["plain"], raw["drafted"], strict=True):
        assert plain["drafted"] == plain["accepted"] == 0
        assert drafted["drafted"] >= drafted["accepted"]
        # The same seeds write the same texts in the torch engine, with drafts or without.
        assert plain["tokens"] == drafted["tokens"] >= raw["samples"]
    assert read["raw"]["not_measured"] == {"vllm": "left out by --engines"}


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(rollout.util, "find_spec", lambda name: None)
    task = load_task(TaskConfig(train_size=8), model, 0)
    findings = rollout.measure(list(rollout.KINDS), model, task, rollout.Plan((1,), 1, 0.01))
    assert "vllm is not installed" in findings.missing["vllm"]
    assert findings.ratios() == {}
    assert findings.table().row_count == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--engines", "vlm"], "no engine 'vlm'"), (["--rows", "1,0"], "positive numbers")],
)
def test_bad_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        rollout.main(arguments)
    assert said in capsys.readouterr().err


def test_a_widened_model_says_the_same(model: str, tmp_path: Path) -> None:
    parameters = widen(model, tmp_path, 256)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (2, 20)))
    logits = []
    for path in (model, str(tmp_path)):
        network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            logits.append(network(tokens).logits)
    assert parameters == sum(p.numel() for p in network.parameters())
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="not above the model's 32"):
        widen(model, tmp_path, 32)
