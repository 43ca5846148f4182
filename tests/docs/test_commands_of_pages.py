"""Each command that a page shows is run by a test or has a reason why not (`command_scenarios`)."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import typer
from command_scenarios import HERE, NOT_RUN, RUN_BY, listed
from each_one import each_one
from shown_commands import EXAMPLES, ROOT, shown_commands

from asyncrl.cli.app import app

SHOWN = shown_commands()
NOT = [command for commands in listed(NOT_RUN).values() for command in commands]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PLACES = ("benchmarks", "docker", "docs", "examples", "requirements", "tests")
"""Folders of the repository that commands name."""


def test_each_command_that_is_shown_is_run_or_has_a_reason() -> None:
    known = [one for table in (RUN_BY, NOT_RUN) for part in listed(table).values() for one in part]
    assert len(known) == len(set(known)), "a command has two entries"
    escaped = {command: places for command, places in SHOWN.items() if command not in known}
    assert not escaped, "give it to a scenario of tests/support/command_scenarios.py"
    assert not set(known) - set(SHOWN), "tests/support/command_scenarios.py: shown no more"


def test_pages_are_drawn_from() -> None:
    """The count falls when the script misses a kind of block."""
    shown = {place for places in SHOWN.values() for place in places}
    assert {"README.md", "tutorial.md", "deploy.md", "operate.md"} <= shown
    assert {str(one.relative_to(ROOT)) for one in EXAMPLES if one.suffix == ".yaml"} <= shown
    assert len([one for one, places in SHOWN.items() if "--help" in places]) == len(COMMANDS)
    assert len(SHOWN) > 250


def test_the_test_that_runs_it_exists() -> None:
    with each_one() as checking:
        for test in RUN_BY:
            path, _, function = test.partition("::")
            with checking(test):
                text = (ROOT / path).read_text(encoding="utf-8")
                assert not function or text.count(f"\ndef {function}(")
                if path == HERE:
                    listed_here = text.count(f'"{function}"')
                    assert listed_here, "it runs something else than what is listed"


def test_each_example_is_trained_by_a_command_that_its_header_shows() -> None:
    with each_one() as checking:
        for example in EXAMPLES:
            place = str(example.relative_to(ROOT))
            if example.suffix != ".yaml" or example.name == "7b-8gpus.yaml":
                continue
            own = [one for one, places in SHOWN.items() if place in places]
            trains = f"asyncrl {'sft' if example.name == 'sft.yaml' else 'run'} {place}"
            with checking(place):
                assert [one for one in own if trains in one or one == "make run"]
                assert [command for command in RUN_BY_ALL if trains in command]


RUN_BY_ALL = [command for commands in listed(RUN_BY).values() for command in commands]


def words_of(command: str) -> list[str]:
    """Without redirections, and with what is optional."""
    text = re.sub(r" > \S+$| < \S+$", "", command)
    if text.startswith("asyncrl ") or " [--" in text:
        text = re.sub(r"\[(--[^]]+)\]", r"\1", text)
    return shlex.split(text)


@pytest.mark.parametrize("command", [one for one in NOT if one.startswith("asyncrl ")])
def test_a_command_of_ours_that_is_not_run_can_be_parsed(command: str) -> None:
    _, name, *arguments = words_of(command)
    if command in listed(NOT_RUN)[next(iter(NOT_RUN))]:
        named = name.split("|")[0]
        longer = [one for one in RUN_BY_ALL if one.startswith(f"asyncrl {named} ")]
        assert named in COMMANDS
        assert longer
    elif name in COMMANDS:
        COMMANDS[name].make_context(name, arguments)
    else:
        assert name == "--install-completion"


@pytest.mark.parametrize("command", [one for one in NOT if one.startswith("make ")])
def test_make_has_this_target(command: str) -> None:
    words = words_of(command.partition(" && ")[0])
    done = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        name
        for command in NOT
        for found in re.findall(r"pip install .*'(?:\.|asyncrl)\[([a-z,-]+)\]'", command)
        for name in found.split(",")
    ]
    assert len(named) > 8
    assert set(named) <= set(project["optional-dependencies"])


def test_files_of_the_repository_that_they_name_exist() -> None:
    named = {
        word
        for command in SHOWN
        for word in re.findall(rf"(?<![\w/.])(?:{'|'.join(PLACES)})/[\w./-]+", command)
    }
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


class Parsed(Exception):  # noqa: N818 - no error
    """The arguments were understood."""


@pytest.mark.parametrize(
    "command", [c for c in NOT if c.startswith("python -m benchmarks.") and ".NAME" not in c]
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_benchmark_takes_the_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: Any, **more: Any) -> None:
        parse(self, *args, **more)
        raise Parsed

    _, _, module, *arguments = words_of(command)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
