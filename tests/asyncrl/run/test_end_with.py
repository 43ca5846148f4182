"""A run that was told to ends with the process that has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from asyncrl_runs import ROOT, CommandLine, call, until

from asyncrl.runs.directory import read_state
from benchmarks.harness import run_command

STARTS_A_RUN = """
import subprocess, sys
from benchmarks.harness import run_command
subprocess.run(run_command(sys.argv[1], sys.argv[2:]), capture_output=True)
"""


def test_a_run_ends_with_the_killed_benchmark_that_started_it(command_line: CommandLine) -> None:
    _python, _m, _asyncrl, _run, config, *overrides = command_line.arguments(run__steps=500)
    benchmark = subprocess.Popen(
        [sys.executable, "-c", STARTS_A_RUN, config, *overrides[1::2]], cwd=ROOT
    )
    command_line.started.append(benchmark)
    until(lambda: command_line.children("trainer"), seconds=120, what="a trainer")
    state = read_state(command_line.folder)
    assert state is not None
    assert is_alive(state.pid)
    benchmark.kill()
    benchmark.wait()
    try:
        until(
            lambda: not is_alive(state.pid) and not command_line.children("trainer"),
            seconds=120,
            what="the end of the run",
        )
    finally:
        if is_alive(state.pid):  # the test has failed
            os.kill(state.pid, signal.SIGKILL)


def test_another_process_than_the_parent_is_refused() -> None:
    command = run_command("none.yaml", ["run.name=x"])
    assert command[5:7] == ["--end-with", str(os.getpid())]
    command[6] = "1"
    done = call(command)
    assert done.returncode == 2
    assert f"process {os.getpid()} started this command" in done.stdout


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
