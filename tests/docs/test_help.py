"""`--help` of every command has an example, and the command takes it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

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
