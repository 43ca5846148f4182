from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from whole_checkpoints import WEIGHTS, truncate, write_whole

from asyncrl.config import parse_config
from asyncrl.errors import UserError
from asyncrl.evaluation import command
from asyncrl.evaluation.command import resolve_target
from asyncrl.run.directory import RunDirectory


def test_a_run_is_evaluated_with_its_own_configuration_and_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "model_of", lambda checkpoint, _: checkpoint / "exported")
    run = {"name": "mine", "directory": str(tmp_path), "seed": 7}
    made = RunDirectory.create(
        parse_config({"run": run}, source="the test"), resume=False, clean=False
    )
    made.close()
    with pytest.raises(UserError, match=r"mine has no checkpoint yet"):
        resolve_target("mine", None, [], tmp_path, Console())
    checkpoint, newer = write_whole(made.path / "checkpoints", 3, 4)
    truncate(newer / WEIGHTS)
    console = Console(record=True, width=500)
    config, model = resolve_target("mine", None, ["evaluation.prompts=5"], tmp_path, console)
    assert model == str(checkpoint / "exported")
    assert "not evaluated: " in (said := console.export_text())
    assert f"step-000004/{WEIGHTS} is truncated" in said
    truncate(checkpoint / WEIGHTS)
    with pytest.raises(UserError, match=r"none of the checkpoints in .* is whole"):
        resolve_target("mine", None, [], tmp_path, console)
    assert (config.run.seed, config.evaluation.prompts) == (7, 5)


def test_a_model_is_evaluated_with_the_defaults_and_overrides(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):  # only looked for
        (tmp_path / name).write_text("{}")
    overrides = ["evaluation.prompts=5"]
    config, _ = resolve_target(str(tmp_path), None, overrides, tmp_path / "runs", Console())
    assert config.evaluation.prompts == 5
