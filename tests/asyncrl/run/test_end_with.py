"""A run that was told to ends with the process that has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from asyncrl_runs import ROOT, CommandLine, call_here, until

from asyncrl.runs.directory import read_state
from benchmarks.harness import run_command


@pytest.mark.usefixtures("_forked_runs")
def test_a_run_ends_with_the_killed_benchmark_that_started_it(command_line: CommandLine) -> None:
    _python, _m, _asyncrl, _run, config, *overrides = command_line.arguments(run__steps=500)
    benchmark = subprocess.Popen(
        [sys.executable, "-m", "starts_a_run", config, *overrides[1::2]], cwd=ROOT
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
    done = call_here(command)  # by this process, which is not its own parent
    assert done.returncode == 2
    assert f"process {os.getppid()} started this command" in done.stdout


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


CHILD = """
import os, signal, sys, time
from asyncrl.cli.training import _end_with
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
_end_with(os.getppid())
print("ready", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(0.5)
open(sys.argv[1], "w").write(str(len(received)))
"""
PARENT = """
import subprocess, sys, threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
start = lambda: subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
if sys.argv[2].endswith("of-a-thread"):
    starting = threading.Thread(target=start)
    starting.start()
    starting.join()
else:
    start()
time.sleep(60)
"""


@pytest.mark.parametrize("starter", ["of-the-process", "of-a-thread"])
def test_a_killed_parent_with_threads_counts_as_one_ctrl_c(starter: str, tmp_path: Path) -> None:
    """A second one would end the run at once. A thread that has started it may end."""
    place = tmp_path / starter
    command = [sys.executable, "-c", PARENT, CHILD, str(place)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        assert not place.exists()
        parent.kill()
    until(place.exists, seconds=30, what="the end of the child")
    until(place.read_text, seconds=5, what="its text")
    assert place.read_text() == "1"
