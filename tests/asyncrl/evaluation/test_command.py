from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.config import parse_config
from asyncrl.errors import UserError
from asyncrl.evaluation.command import resolve_target
from asyncrl.run.directory import RunDirectory


def test_a_run_is_evaluated_with_its_own_configuration_and_overrides(tmp_path: Path) -> None:
    run = {"name": "mine", "directory": str(tmp_path), "seed": 7}
    made = RunDirectory.create(
        parse_config({"run": run}, source="the test"), resume=False, clean=False
    )
    made.close()
    with pytest.raises(UserError, match=r"mine has no checkpoint yet"):
        resolve_target("mine", None, [], tmp_path, Console())
    checkpoint = made.path / "checkpoints" / "step-000003"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text(json.dumps({"policy_version": 3}))
    config, model = resolve_target("mine", None, ["evaluation.prompts=5"], tmp_path, Console())
    assert model == str(checkpoint / "model")
    assert (config.run.seed, config.evaluation.prompts) == (7, 5)


def test_a_model_is_evaluated_with_the_defaults_and_overrides(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):  # only looked for
        (tmp_path / name).write_text("{}")
    overrides = ["evaluation.prompts=5"]
    config, _ = resolve_target(str(tmp_path), None, overrides, tmp_path / "runs", Console())
    assert config.evaluation.prompts == 5
