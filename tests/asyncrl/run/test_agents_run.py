"""A run on agents: real processes of this machine, as in containers of three machines.

`tests/deploy/agents.py` kills and returns every part of such a run.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Agents
from asyncrl_runs import UNHURRIED, CommandLine, until, worst_mismatch
from typer.testing import CliRunner

from asyncrl.cli.entry import app
from asyncrl.monitoring.records.group_account import read_account

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


@pytest.mark.usefixtures("_forked_runs")
def test_a_run_whose_agents_come_and_go(command_line: CommandLine, agents: Agents) -> None:
    command = command_line
    assert CliRunner().invoke(app, ["agent-key", str(agents.key_file)]).exit_code == 0
    settings = {
        "launcher__agents__relays": "always",
        "run__steps": 1_000_000,
        "rewards__functions": UNHURRIED,
    }

    def steps_more(count: int) -> None:
        before = command.steps() if (command.folder / "metrics.jsonl").exists() else 0
        command.wait_for_steps(before + count)

    command.phase("it begins on two agents")
    trainer = agents.start("t", "trainer", "--once")
    first = agents.start("g", "generator", "--ports", f"{agents.port + 2}-{agents.port + 9}")
    try:
        run = command.start("--continue", *agents.settings, **settings)
        until(lambda: (command.folder / "metrics.jsonl").exists(), seconds=240, what="training")
        steps_more(1)
        command.phase("a generator joins")
        second = agents.start("h", "generator", "--once")
        log = command.folder / "logs" / "generator-1.log"
        until(lambda: log.exists() and "forward" in log.read_text(), seconds=240, what="a joiner")
        command.phase("a generator leaves")
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=240) == 0, agents.said("g")
        assert f"left run {command.name}" in agents.said("g")
        steps_more(2)
        command.phase("it is stopped")
        assert CliRunner().invoke(app, ["stop", str(command.folder)]).exit_code == 0
        said = run.communicate(timeout=240)[0]
        assert run.returncode == 0, said
        assert re.search(r"generator-0 leaves; samples that move with their tokens: \d", said), said
        assert "was lost" not in said
    finally:
        command.end()
    the_run_is_exact(command)
    assert trainer.wait(timeout=60) == second.wait(timeout=60) == 0
    until(lambda: not command.children("generator"), seconds=60, what="the generators' end")
    until(lambda: not command.children("trainer"), seconds=60, what="the trainer's end")
    until(lambda: not command.children("relay"), seconds=60, what="the relays' end")
