"""What the command line prints, whatever the text and the terminal."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from asyncrl import cli
from asyncrl.cli import entry
from asyncrl.cli.app import app
from asyncrl.config.run_config import load_config
from asyncrl.controller import execute
from asyncrl.runs.directory import RunDirectory


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> str:
    """What a command that is refused writes to standard error."""
    monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(2, "No such file or directory", "run.yaml"), 2),
        (OSError(28, "No space left on device", "runs/metrics.jsonl"), 1),
        (TimeoutError(), None),
        (ConnectionResetError(104, "Connection reset by peer"), None),
        (OSError(5, "Input/output error", "runs/metrics.jsonl"), 1),
    ],
)
def test_only_paths_are_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch, error: OSError, code: int | None
) -> None:
    """Exit code 2 keeps a supervisor from starting a run again; a fault keeps its traceback."""

    def app() -> None:
        raise error

    monkeypatch.setattr(entry, "app", app)
    with pytest.raises(SystemExit if code is not None else type(error)) as caught:
        cli.main()
    assert code is None or caught.value.code == code


def test_errors_print_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text('trainer: {"\\e[2J\\e]0;owned\\a": 1}\n')
    text = printed(capsys, monkeypatch, "run", str(file))
    assert "trainer.[2J]0;owned: there is no such key" in text
    assert [char for char in text if char != "\n" and not char.isprintable()] == []


def test_a_run_of_epochs_is_complete_once_their_steps_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("run: {epochs: 2}\n")
    ended = RunDirectory.create(load_config(None, ["run.steps=9"]), resume=False, clean=False)
    ended.state.ended = "done"
    ended.write_state()
    ended.close()
    for steps in (9, 10):
        prepared = Mock(config=load_config(None, [f"run.steps={steps}"]))
        monkeypatch.setattr("asyncrl.startup.prepare.prepare", lambda *_, one=prepared: one)
        command = ["run", "run.yaml", "--continue", "--dry-run"]
        said = CliRunner().invoke(app, command).output
        assert said.startswith("the run in runs/run is complete" if steps == 9 else "dry run"), said


def test_an_output_that_cannot_show_every_character_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setattr(entry, "app", lambda: print("0.25 ± 0.4", flush=True))
    cli.main()
    assert output.getvalue() == b"0.25 ? 0.4\n"


def test_a_pipe_that_is_closed_ends_nothing() -> None:
    program = (
        "import os, sys\n"
        "from asyncrl.cli import app as terminal, entry\n"
        "def app():\n"
        "    console = terminal.TerminalConsole()\n"
        "    for _ in range(3):\n"
        "        console.print('x' * 3000)\n"
        "    print('the end', file=sys.stderr)\n"
        "entry.app = app\n"
        "entry.main()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"the end\n")


def test_no_message_of_a_run_is_wrapped() -> None:
    """A path or a command that is cut in two cannot be copied."""
    tree = ast.parse(Path(execute.__file__).read_text(encoding="utf-8"))
    calls = [
        node.keywords
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "console.print" in ast.unparse(node).split("(")[:2]
    ]
    calls += [
        node.keywords
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("partial(console.print")
    ]
    assert len(calls) > 2
    assert all("soft_wrap" in [keyword.arg for keyword in keywords] for keywords in calls)
