"""`--help` of every command has an example, and the command takes it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.entry import main  # adds the commands

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_that_it_takes(name: str) -> None:
    assert main is not None
    command = COMMANDS[name]
    assert command.help, f"asyncrl {name} has no docstring"
    start = f"Example: asyncrl {name} "
    assert f"{command.epilog} ".startswith(start), f"add epilog={start!r}... to @app.command"
    arguments = shlex.split(command.epilog.removeprefix(start.strip()))
    command.make_context(name, arguments)  # raises click.UsageError if it cannot be parsed


def completed(words: list[str], incomplete: str) -> list[str]:
    """What bash gets after these words."""
    line = ["asyncrl", *words, incomplete]
    asked = {"COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    env = {"_ASYNCRL_COMPLETE": "complete_bash"} | asked
    return CliRunner().invoke(app, [], prog_name="asyncrl", env=env).output.split()


def test_the_shell_completes_keys_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "trained").mkdir(parents=True)
    (tmp_path / "runs" / "trained" / "run.json").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(["run", "run.yaml", "--set"], "trainer.learning_rate_m") == [
        "trainer.learning_rate_minimum="
    ]
    assert len(completed(["doctor", "--set"], "")) > 200
    assert completed(["run", "run.yaml", "--set"], "run.name=fi") == []
    assert completed(["set"], "train") == [
        *("trained", "trainer.checkpoint_every=", "trainer.learning_rate="),
    ]
    assert completed(["set", "trained"], "train") == [
        *("trainer.checkpoint_every=", "trainer.learning_rate="),
    ]
    heavy = "import asyncrl.cli.entry, sys; sys.exit('asyncrl.config.run_config' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", heavy], check=True
    )  # or each TAB takes half a second more


def test_the_shell_completes_names_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "fourth", "second"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").touch()
    monkeypatch.chdir(tmp_path)
    command = COMMANDS["status"]
    argument = next(one for one in command.params if one.name == "name")
    context = command.make_context("status", [], resilient_parsing=True)
    found = argument.shell_complete(context, "f")
    assert [item.value for item in found] == ["first", "fourth"]
