"""`~` and `${NAME}` in every setting that is a path."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl.config.run_config import dump_config, load_config, parse_config
from asyncrl.errors import ConfigError

PATHS = {
    "run.directory": "run.directory={}",
    "monitoring.web.token_file": "monitoring.web.token_file={}",
    "launcher.agents.key_file": "launcher.agents.key_file={}",
    "model.path": "model.path={}",
    "task.path": "task={{kind: dataset, path: '{}'}}",
    "task.evaluation_path": "task={{kind: dataset, path: p, evaluation_path: '{}'}}",
    "rewards.functions[0].name": "rewards.functions=[{{name: '{}'}}]",
}


@pytest.mark.parametrize("key", PATHS)
def test_every_path_is_expanded_or_refused_with_its_key(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_HERE", "/data")
    monkeypatch.setenv("AGAIN", "${DATA_HERE}")
    monkeypatch.delenv("UNSET_HERE", raising=False)
    config = load_config(None, [PATHS[key].format("~/${DATA_HERE}/x.py:f")])
    written = dump_config(config)
    assert f"{Path.home()}//data/x.py:f" in written
    assert parse_config(yaml.safe_load(written), source="the dump") == config
    for path, message in (
        ("${UNSET_HERE}/x", "the environment variable UNSET_HERE is not set"),
        ("$DATA_HERE/x", "dollar sign in a path"),
        ("${AGAIN}/x", "dollar sign in a path"),
        ("~nobody-of-this-name/x", "there is no user ~nobody-of-this-name"),
        ("d/" + "ü" * 128, "a file or folder name has at most 255 bytes"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [PATHS[key].format(path)])
        (_, line) = str(caught.value).splitlines()
        assert line.strip().startswith(f"{key}: "), line
        assert message in line


def test_files_that_other_commands_look_up_are_saved_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["monitoring.web.token_file=keys/web", "launcher.agents.key_file=k"])
    assert config.monitoring.web.token_file == str(tmp_path / "keys/web")
    assert config.launcher.agents.key_file == str(tmp_path / "k")
    with pytest.raises(ConfigError, match="cannot be empty"):
        load_config(None, ["monitoring.web.token_file=''"])


def test_what_is_not_here_is_found_next_to_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's saved configuration has the whole path, so that other commands find the file too."""
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for place in (folder, folder / "runs", elsewhere):
        place.mkdir()
    for name in ("rows.jsonl", "play.py", "here.py"):
        (folder / name).touch()
    (elsewhere / "here.py").touch()
    (folder / "run.yaml").write_text(
        "task: {kind: dataset, path: rows.jsonl, map: 'gone.py:f'}\n"
        "environment: {name: 'agent:play.py:solve'}\n"
        "rewards: {functions: [{name: 'here.py:score'}, {name: 'exact_match'}]}\n"
        "model: {path: org/name}\n"
        "trainer: {algorithm: 'play.py:Mine'}\n"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("../mine/run.yaml"))
    assert config.task.path == str(folder / "rows.jsonl")
    assert config.environment.name == f"agent:{folder}/play.py:solve"
    assert config.trainer.algorithm == f"{folder}/play.py:Mine"
    names = [one.name for one in config.rewards.functions]
    assert names == ["here.py:score", "exact_match"], "what is here is not looked for there"
    unknown = (config.task.map, config.model.path, config.run.directory)
    assert unknown == ("gone.py:f", "org/name", "runs")
    assert parse_config(yaml.safe_load(dump_config(config)), source="the dump") == config
    monkeypatch.chdir(folder)
    assert load_config(Path("run.yaml")).task.path == "rows.jsonl"
