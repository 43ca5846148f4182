"""Which run is meant, and looks at a folder that change nothing."""

from __future__ import annotations

import errno
import fcntl
import operator
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import make_run
from typer.testing import CliRunner

from asyncrl.cli import entry
from asyncrl.cli.app import app
from asyncrl.config.run_config import parse_config
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.monitoring.records.jsonl import read_undamaged
from asyncrl.runs import folder_lock, run_list
from asyncrl.runs.directory import RunDirectory, find_run, is_alive
from asyncrl.runs.run_list import find_run_for_order, list_runs
from asyncrl.steering import control_socket as asking
from asyncrl.wire.messages import control
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.transport.atomic_files import write_atomically


def started(runs: Path, name: str) -> RunDirectory:
    """An active run of this process."""
    run = {"name": name, "directory": str(runs)}
    made = RunDirectory.create(parse_config({"run": run}, source=name), resume=False, clean=False)
    made.write_state()
    return made


def test_an_order_for_an_older_run_does_not_make_it_the_newest(tmp_path: Path) -> None:
    first, second = started(tmp_path, "first"), started(tmp_path, "second")
    write_atomically(first.path / "config.yaml", (first.path / "config.yaml").read_text() + "\n")
    first.write_state()
    assert find_run(None, tmp_path) == second.path
    for one in (first, second):
        one.close()


def test_a_bare_order_is_for_the_only_active_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Path] = []
    reply: Any = control.Accepted("it ends")

    def ask(run: Path, _request: control.Request) -> Any:
        sent.append(run)
        return reply

    monkeypatch.setattr(asking, "ask", ask)
    first, second = started(tmp_path, "first"), started(tmp_path, "second")
    words = ["--runs", str(tmp_path)]
    done = CliRunner().invoke(app, ["stop", *words])
    assert isinstance(done.exception, UserError)
    assert re.search(r"2 runs .* active: first, second.*asyncrl stop first", str(done.exception))
    assert sent == []
    second.close()
    assert CliRunner().invoke(app, ["stop", *words]).output == "first: it ends\n"
    assert sent == [first.path]
    reply = control.StatusReply({})
    done = CliRunner().invoke(app, ["stop", "first", *words])
    assert isinstance(done.exception, AsyncrlError), "it is not known whether the run stops"
    first.close()
    assert find_run_for_order(None, tmp_path) == second.path, "the one that was started last"


def test_any_number_may_look_at_once_and_a_run_begins_meanwhile(tmp_path: Path) -> None:
    (tmp_path / folder_lock.NAME).touch()
    looking = os.open(tmp_path / folder_lock.NAME, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not is_alive(tmp_path), "somebody else looks"
    closing = threading.Timer(0.1, os.close, [looking])
    began = time.monotonic()
    closing.start()
    lock = folder_lock.take(tmp_path)
    closing.join()
    assert lock is not None
    assert time.monotonic() - began >= 0.05
    assert is_alive(tmp_path)
    assert folder_lock.take(tmp_path) is None
    os.close(lock)


def test_a_look_writes_nothing(tmp_path: Path) -> None:
    assert not is_alive(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / folder_lock.NAME).touch(0o444)
    assert not is_alive(tmp_path)


def test_one_run_that_cannot_be_read_is_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        make_run(tmp_path / name, steps=4)
        (tmp_path / name / folder_lock.NAME).touch()
    opening = os.open

    def refused(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path) == str(tmp_path / "theirs" / folder_lock.NAME):
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, *arguments, **named)

    monkeypatch.setattr(folder_lock.os, "open", refused)
    found = {run.name: run for run in list_runs(tmp_path)}
    assert found["theirs"].state == "unreadable"
    assert (found["mine"].state, found["mine"].step) != ("unreadable", 0)


def test_only_the_end_of_the_records_is_read_for_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = make_run(tmp_path / "run", steps=4) / "metrics.jsonl"
    last = read_undamaged(metrics, StepMetrics)[0][-1]
    monkeypatch.setattr(run_list, "read_undamaged", lambda *_: pytest.fail("all of it was read"))
    (found,) = list_runs(tmp_path)
    assert (found.step, found.reward) == (last.step + 1, last.learning.reward_mean)
    monkeypatch.setattr(run_list, "read_undamaged", read_undamaged)
    monkeypatch.setattr(run_list, "_TAIL_BYTES", 10)
    assert list_runs(tmp_path) == [found], "a last line that is longer"


def without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    "command",
    [
        ["status", "first"],
        ["stop", "first"],
        ["pause", "first"],
        ["watch", "first"],
        ["set", "first", "trainer.learning_rate=1e-5"],
        ["checkpoint", "first"],
        ["web", "first"],
    ],
    ids=operator.itemgetter(0),
)
def test_a_folder_that_cannot_be_locked_is_one_sentence_in_every_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    """As on NFS without its lock service."""
    started(tmp_path, "first").close()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    monkeypatch.setattr(sys, "argv", ["asyncrl", *command, "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the run's folder {tmp_path / 'first'} cannot be locked: No loc")
    assert "local_lock=flock" in said
    assert len(said.splitlines()) == 1


def test_a_start_leaves_nothing_in_a_folder_that_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    config = parse_config({"run": {"name": "new", "directory": str(tmp_path)}}, source="new")
    with pytest.raises(folder_lock.UnlockableError):
        RunDirectory.create(config, resume=False, clean=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 2), (errno.EIO, 1), (errno.ESTALE, 1), (errno.ENOSPC, 1)]
)
def test_what_a_disk_refuses_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
) -> None:
    def refused(path: Path) -> bool:
        raise OSError(number, os.strerror(number), str(path))

    started(tmp_path, "first").close()
    monkeypatch.setattr(folder_lock, "is_held", refused)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "stop", "first", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert str(tmp_path / "first") in said
    assert len(said.splitlines()) == 1
