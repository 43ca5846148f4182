"""`asyncrl init` writes files that a run takes as they are, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.entry import main  # adds the commands
from asyncrl.config.run_config import load_config
from asyncrl.errors import UserError
from asyncrl.initialise.write import initialise
from asyncrl.rewards.functions import load_function
from asyncrl.tasks.loading import dataset_questions

NAMES = ["questions.jsonl", "rewards.py", "run.yaml"]


def test_the_files_are_a_configuration_data_and_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(path.name for path in initialise(tmp_path / "new" / "folder")) == NAMES
    monkeypatch.chdir(tmp_path / "new" / "folder")
    config = load_config(Path("run.yaml"))
    train, held_out = dataset_questions(config.task, config.run.seed)
    assert (len(train), len(held_out)) == (512, 64)
    assert len({question.content for question in train + held_out}) == 576
    (function,) = config.rewards.functions
    score = load_function(function.name, function.args)
    example = {"answer": "168"}
    assert [score("", text, example) for text in ("1+2:168", "168", ":16", ":1688")] == [1, 1, 0, 0]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "rewards.py"
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"rewards\.py is there already, and init overwrites"):
        initialise(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    assert mine.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        initialise(tmp_path / "file" / "folder")


def test_the_command_says_how_to_train(tmp_path: Path) -> None:
    assert main is not None
    folder = tmp_path / "my first"
    shown = "prometheus --config.file=monitoring/prometheus.yml"
    done = CliRunner().invoke(app, ["init", str(folder)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"wrote {folder / 'run.yaml'}"
    assert lines[-1] == f"train with: cd '{folder}' && asyncrl run run.yaml"
    for code in (0, 1):  # the second call overwrites nothing
        done = CliRunner().invoke(app, ["init", "--prometheus", str(folder)])
        assert done.exit_code == code, done.output
        assert code or f"cd '{folder}' && {shown} " in done.output
