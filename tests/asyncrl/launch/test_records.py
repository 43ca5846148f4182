"""Leftover processes of a killed controller are ended, and no other process is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from asyncrl_runs import until

from asyncrl.launch.identity import identity_of, is_running, send, status_of
from asyncrl.launch.records import MARK_VARIABLE, ProcessRecord, ProcessRecords, end_leftovers

FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
in_session = subprocess.Popen(sleep, env={})
escaped = subprocess.Popen(sleep, start_new_session=True)
print(in_session.pid, escaped.pid, flush=True)
time.sleep(600)
"""
"""A child that starts a process without our environment and one in a session of its own."""


class Family:
    """A started child and what it has started."""

    def __init__(self, mark: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", FAMILY],
            env={**os.environ, MARK_VARIABLE: mark},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self.child.stdout is not None
        self.pids = [self.child.pid, *map(int, self.child.stdout.readline().split())]

    def running(self) -> list[int]:
        alive = []
        for pid in self.pids:
            process = identity_of(pid)
            if process is not None and is_running(process):
                alive.append(pid)
        return alive

    def kill(self) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        self.child.communicate()


@pytest.fixture
def mark_and_family(tmp_path: Path) -> Iterator[tuple[ProcessRecords, Family]]:
    records = ProcessRecords(tmp_path)
    family = Family(records.mark)
    records.add("generator-0", family.child.pid)
    yield records, family
    family.kill()


def test_a_stopped_child_its_session_and_what_escaped_from_it_are_ended(
    tmp_path: Path, mark_and_family: tuple[ProcessRecords, Family]
) -> None:
    _, family = mark_and_family
    os.kill(family.child.pid, signal.SIGSTOP)
    said: list[str] = []
    end_leftovers(tmp_path, said.append)
    assert not family.running()
    assert f"generator-0 (process {family.child.pid})" in said[0]
    assert "a process that it started" in said[0]
    end_leftovers(tmp_path, said.append)  # nothing is left to say
    assert len(said) == 1


def test_what_a_dead_child_has_started_is_found_by_its_mark(
    tmp_path: Path, mark_and_family: tuple[ProcessRecords, Family]
) -> None:
    _, family = mark_and_family
    family.child.kill()
    family.child.wait()
    said: list[str] = []
    end_leftovers(tmp_path, said.append)
    # The one without our mark cannot be told from another user program's process any more.
    assert family.running() == [family.pids[1]]


def test_another_process_with_a_recorded_id_is_left_alone(tmp_path: Path) -> None:
    family = Family("the mark of another controller")
    try:
        process = identity_of(family.child.pid)
        assert process is not None
        others = [
            msgspec.structs.replace(process, started=process.started - 1),
            msgspec.structs.replace(process, boot="another boot"),
        ]
        lines = [
            msgspec.json.encode(ProcessRecord("trainer", other, "our mark")) for other in others
        ]
        (tmp_path / "processes.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        said: list[str] = []
        end_leftovers(tmp_path, said.append)
        assert family.running() == family.pids
        assert not said
        for other in others:
            send(other, signal.SIGKILL)
        assert family.running() == family.pids
    finally:
        family.kill()


def test_a_controller_kills_everything_with_its_own_mark(
    mark_and_family: tuple[ProcessRecords, Family],
) -> None:
    records, family = mark_and_family
    other = Family("another mark")
    try:
        records.end_all()
        assert family.running() == [family.pids[1]]
        assert other.running() == other.pids
        assert records.end_all() == []
    finally:
        other.kill()


def test_a_status_is_read_whatever_the_process_is_called(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    sleeper = subprocess.Popen([program, "600"])
    try:
        until(
            lambda: "S 1" in Path(f"/proc/{sleeper.pid}/stat").read_text(),
            seconds=60,
            what="the program to start",
        )
        status = status_of(sleeper.pid)
        assert status is not None
        assert status.parent == os.getpid()
        assert status.session == os.getsid(0)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert identity_of(sleeper.pid) is None


def test_a_damaged_record_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "processes.jsonl").write_text('{"name": 3}\n{}\n')
    said: list[str] = []
    end_leftovers(tmp_path, said.append)
    assert "cannot be looked for" in said[0]
