"""A run on agents: real processes of this machine, as in containers of three machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Agents
from asyncrl_runs import CommandLine, call, until, worst_mismatch

from monitoring.group_account import read_account

pytestmark = pytest.mark.slow


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    try:
        yield agents
    finally:
        agents.end()


def the_run_is_exact(command: CommandLine) -> None:
    steps = command.metrics()
    assert [one.step for one in steps] == list(range(len(steps)))
    assert read_account(command.folder).is_exact
    assert max(one.staleness.max for one in steps) == 0
    assert worst_mismatch(steps) < 1e-3


def test_a_run_on_three_agents(tmp_path: Path, own_model: Path, agents: Agents) -> None:
    command = CommandLine(tmp_path / "runs", own_model)
    key = ["-m", "asyncrl", "agent-key", str(agents.key_file)]
    assert call([command.arguments()[0], *key]).returncode == 0
    processes = [
        agents.start("t", "trainer", "--once"),
        agents.start("g", "generator", "--once", "--ports", f"{agents.port + 2}-{agents.port + 9}"),
        agents.start("h", "generator", "--once"),
    ]
    try:
        done = command.run(
            *agents.settings, launcher__generators=2, launcher__agents__relays="always"
        )
    finally:
        command.end()
    assert done.returncode == 0, done.stdout
    the_run_is_exact(command)
    for process in processes:
        assert process.wait(timeout=30) == 0
    assert "relay-2" in "".join(one.name for one in (command.folder / "logs").iterdir())
    until(lambda: not command.children("generator"), seconds=30, what="the generators' end")
    until(lambda: not command.children("trainer"), seconds=30, what="the trainer's end")
