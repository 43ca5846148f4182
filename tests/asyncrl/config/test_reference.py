from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from each_one import each_one
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.config.reference import Section, Setting, explain_config, reference_page, sections
from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.tasks.evaluation_config import EvaluationSetConfig

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def section_named(path: str) -> Section:
    return next(section for section in sections() if section.path == path)


def setting_named(path: str, name: str) -> Setting:
    return next(setting for setting in section_named(path).settings if setting.name == name)


def test_the_page_on_disk_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_page(), (
        "docs/configuration.md is stale: python -m asyncrl.config.reference > docs/configuration.md"
    )


def test_every_setting_says_what_it_means() -> None:
    settings = [(section, setting) for section in sections() for setting in section.settings]
    with each_one() as checking:
        for section, setting in settings:
            with checking(f"{section.path}.{setting.name}"):
                assert setting.meaning.endswith((".", ")")), "write a docstring under the field"
                python = re.findall(r"\b(?:None|True|False)\b", setting.meaning)
                assert not python, f"users write YAML: null, true or false, not {python[0]}"


def test_every_section_says_what_it_is() -> None:
    assert [section.path for section in sections() if not section.meaning] == []
    tests = [section.path for section in sections() if ">>>" in section.meaning]
    assert not tests, "users read it here and in --explain"


def test_no_key_is_left_out() -> None:
    def keys(values: object, path: str) -> set[str]:
        if isinstance(values, list) and values and isinstance(values[0], dict):
            return {path}.union(*(keys(value, f"{path}[]") for value in values))
        if isinstance(values, dict) and values:
            return set().union(*(keys(value, f"{path}.{name}") for name, value in values.items()))
        return {path}

    listed = {f"{s.path}.{setting.name}" for s in sections() for setting in s.settings}
    dumped = RunConfig().model_dump(mode="json")
    entries = {"evaluation.sets.NAME": EvaluationSetConfig, "monitoring.sinks[]": SinkConfig}
    of_entries = {f"{path}.{name}" for path, one in entries.items() for name in one.model_fields}
    known = set().union(*(keys(values, name) for name, values in dumped.items()))
    assert listed == known | of_entries


def test_named_sets_and_sinks_are_explained_and_read_again() -> None:
    sets = {"hard": {"path": "/data/hard.jsonl", "samples": 4}, "own": {"path": "/data/own.jsonl"}}
    sinks = ["mlflow", {"kind": "wandb", "offline": True}]
    values = {"evaluation": {"every": 5, "sets": sets}, "monitoring": {"sinks": sinks}}
    config = parse_config(values, source="the test")
    text = explain_config(config)
    assert parse_config(yaml.safe_load(text), source="explained") == config
    assert "    hard:\n      # A .jsonl or .parquet file" in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_explained_configuration_loads_again(path: Path) -> None:
    config = load_config(path)
    explained = yaml.load(explain_config(config), yaml.CSafeLoader)
    assert parse_config(explained, source="explained") == config


def test_bounds_choices_and_defaults_come_from_the_fields() -> None:
    assert setting_named("engine", "top_k_logprobs").summary == "integer ≥ 0, ≤ 64; default: 64"
    threads = setting_named("engine", "threads").summary
    assert threads == "integer ≥ 1, ≤ 1,024, or null; default: null"
    assert setting_named("sampling", "top_p").summary == "number ≥ 0.01, ≤ 1; default: 1.0"
    assert setting_named("engine", "kind").values == "`torch`, `vllm` or `sglang`"
    assert setting_named("launcher", "kind").values == "`local`, `ray` or `agents`"
    assert setting_named("trainer", "betas").summary == "[number, number]; default: [0.9, 0.999]"
    assert setting_named("cache", "max_bytes").default == "1073741824 (1024 MiB)"
    assert setting_named("rewards.functions[]", "name").values == "text (not empty)"


def test_explain_prints_the_meaning_of_each_key_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{name: mine, directory: {tmp_path / 'runs'}}}\n")
    result = CliRunner().invoke(app, ["run", str(file), "--explain", "--set", "engine.slots=7"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    place = lines.index("  slots: 7")
    assert lines[place - 1] == "  # integer ≥ 1, ≤ 65,536; default: 64"
    assert lines[place - 2].startswith("  # ")
    assert yaml.safe_load(result.output)["engine"]["slots"] == 7
    assert not (tmp_path / "runs").exists()
