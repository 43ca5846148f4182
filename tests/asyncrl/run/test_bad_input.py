"""Mistakes of a user: one paragraph about what to change, exit code 2, and no run folder.

One is made in a process. The others are made in this one: a traceback there fails the test itself.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from asyncrl_runs import OWN, CommandLine, call, call_here

pytestmark = pytest.mark.slow


def refused(command_line: CommandLine, *expected: str, **settings: object) -> str:
    return refusal(call_here(command_line.arguments(**settings)), *expected)


def refusal(done: subprocess.CompletedProcess[str], *expected: str) -> str:
    assert done.returncode == 2, done.stdout
    ours = [
        name
        for name in ("asyncrl/cli/", "asyncrl/controller/", "asyncrl/startup/")
        if name in done.stdout
    ]
    assert not ours, f"a traceback of asyncrl's own: {done.stdout}"
    flat = " ".join(done.stdout.split())
    for text in expected:
        assert text in flat, done.stdout
    return flat


def test_a_missing_configuration() -> None:
    arguments = [sys.executable, "-m", "asyncrl", "run", "examples/aritmetic.yaml"]
    said = refusal(call(arguments), "no configuration file at examples/aritmetic.yaml")
    assert refusal(call_here(arguments)) == said, "in this process it is the same"


def test_a_misspelled_key(command_line: CommandLine) -> None:
    refused(command_line, "trainer.learning_rte", "'learning_rate'", trainer__learning_rte=1)
    assert not command_line.folder.exists()


def test_a_missing_data_file(command_line: CommandLine) -> None:
    refused(command_line, "nowhere.jsonl", task__path="nowhere.jsonl")
    assert not command_line.folder.exists()


def test_an_example_without_the_field(command_line: CommandLine, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = (OWN / "questions.jsonl").read_text().splitlines()
    data.write_text("\n".join([*rows, json.dumps({"frage": "?", "reference": "1"})]))
    refused(command_line, "data.jsonl:13", "'question'", task__path=data)
    assert not command_line.folder.exists()


def test_a_model_without_a_tokenizer(
    command_line: CommandLine, own_model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(own_model, bare, ignore=shutil.ignore_patterns("token*", "special*"))
    refused(command_line, str(bare.name), "tokenizer", model__path=bare)
    assert not command_line.folder.exists()


def test_a_reward_that_does_not_exist(command_line: CommandLine) -> None:
    functions = "[{name: exact_mach}]"
    refused(command_line, "exact_mach", "exact_match", rewards__functions=functions)
    assert not command_line.folder.exists()


def test_a_metrics_port_in_use(command_line: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(command_line, f"port {port}", "monitoring.port", monitoring__port=port)
        of_the_trainer = f"other programs have {port}"
        refused(command_line, of_the_trainer, "monitoring.port", monitoring__port=port - 1)
    assert not command_line.folder.exists()


def test_answers_that_do_not_fit_the_engine(command_line: CommandLine) -> None:
    refused(command_line, "sampling.max_tokens 120", "max_model_len", sampling__max_tokens=120)
    assert not command_line.folder.exists()


def test_a_path_too_long_for_sockets(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    refused(command_line, "too long for Unix sockets", "XDG_RUNTIME_DIR")
    assert not command_line.folder.exists()


def test_a_run_name_in_use(command_line: CommandLine) -> None:
    command_line.folder.mkdir(parents=True)
    (command_line.folder / "config.yaml").write_text("{}\n")
    said = refused(command_line, f"'{command_line.name}' is in use", "--resume", "--clean")
    assert "model:" not in said, "refused before the model and the data are loaded"


def test_a_dry_run_prints_what_a_start_prints_and_creates_nothing(
    command_line: CommandLine,
) -> None:
    done = call_here(command_line.arguments("--dry-run"))
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    heads = ("model", "data", "mode", "training", "processes", "memory", "results")
    assert [line.split()[0] for line in lines if line.split()[0] in heads] == list(heads)
    assert lines[-1].startswith("dry run: nothing was started")
    assert not command_line.runs.exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model__path", "nowhere", "nowhere"),
        ("task__path", "nowhere.jsonl", "nowhere.jsonl"),
        ("task__prompt_field", "frage", "'frage'"),
        ("rewards__functions", "[{name: nowhere.py:score}]", "nowhere.py"),
    ],
)
def test_a_dry_run_and_doctor_find_what_a_start_finds(
    command_line: CommandLine, name: str, value: str, said: str
) -> None:
    arguments = command_line.arguments(**{name: value})
    refusal(call_here([*arguments, "--dry-run"]), said)
    refusal(call_here(["doctor" if one == "run" else one for one in arguments]), said)
    assert not command_line.folder.exists()


@pytest.mark.usefixtures("_forked_runs")
def test_an_algorithm_that_cannot_be_imported(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nowhere")
    mine = f"{tmp_path / 'broken.py'}:Mine"
    refused(command_line, "No module named 'nowhere'", trainer__algorithm=mine)
    assert not command_line.folder.exists()
