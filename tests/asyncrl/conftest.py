"""A command line with its own run folder, and a small model for it."""

from __future__ import annotations

import os
import runpy
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from asyncrl_runs import OWN, CommandLine
from tried_here import tried, try_here

from asyncrl.startup import model_check


@pytest.fixture(autouse=True)
def _models_are_tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by commands that run in this process; `test_model_check` has the trial's own."""
    monkeypatch.setattr(model_check, "tried", tried)


@pytest.fixture(scope="session")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer, which has been tried."""
    directory = tmp_path_factory.mktemp("own") / "llama"
    runpy.run_path(str(OWN / "make_model.py"))["make"](directory)
    try_here(directory)
    return directory


@pytest.fixture
def command_line(
    tmp_path: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """A command line. No process of it may be alive when the test ends.

    Its sockets have a folder of their own: a run that another test resumes removes what killed runs
    left in the user's.
    """
    command = CommandLine(tmp_path / "runs", own_model)
    with tempfile.TemporaryDirectory(prefix="runtime-") as sockets:  # tmp_path is too long
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        yield command
        command.end()
    left = [pid for role in ("trainer", "generator", "relay") for pid in command.children(role)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes of the run are still alive"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """Add the phase and the folder of its logs to the error of a test with a run."""
    command = getattr(item, "funcargs", {}).get("command_line")
    if call.excinfo is not None and isinstance(command, CommandLine):
        call.excinfo.value.add_note(command.where())
    return (yield)
