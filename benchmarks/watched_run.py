"""A run that trains on while benchmarks watch it; its steps change nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asyncrl.monitoring.records.metrics_log import read_metrics
from benchmarks.harness import run_command

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
SETTLE_SECONDS = 3.0
"""Between a change of the watchers and the period that is measured."""
SMOKE_SECONDS = 0.5
"""Of a period of a smoke, if it has its steps by then."""
PERIOD_STEPS = 2
"""A period has so many steps at least."""
START_SECONDS = 300.0
_TICK = os.sysconf("SC_CLK_TCK")


@contextmanager
def watched_run(steps: int, more: Sequence[str] = ()) -> Iterator[tuple[Path, int]]:
    """The run's folder and its controller's process id, after so many steps; both go afterwards."""
    with tempfile.TemporaryDirectory(prefix="watchers-") as folder:
        yield from _watched_run(folder, steps, more)


def _watched_run(folder: str, steps: int, more: Sequence[str]) -> Iterator[tuple[Path, int]]:
    run = Path(folder) / "watched"
    settings = [
        f"run.directory={folder}",
        "run.name=watched",
        "run.steps=1000000",
        "trainer.learning_rate=1e-12",
        "trainer.checkpoint_every=1000000",
        "evaluation.prompts=1",
        "monitoring.live=off",
        *more,
    ]
    process = subprocess.Popen(run_command(EXAMPLE, settings), stdout=subprocess.DEVNULL)
    try:
        _wait_for_steps(run, process, steps)
        yield run, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def own_bytes(pid: int) -> int:
    """Memory of a process that is no file's; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return 0


def watch_for(run: Path, seconds: float) -> list[float]:
    """When steps were finished in the next seconds, or in more until there are `PERIOD_STEPS`."""
    began, deadline = time.time(), time.monotonic() + seconds + START_SECONDS
    time.sleep(seconds)
    while True:
        times = [one.time for one in read_metrics(run / "metrics.jsonl") if one.time >= began]
        if len(times) >= PERIOD_STEPS:
            return times
        if time.monotonic() > deadline:
            raise SystemExit(f"no {PERIOD_STEPS} steps within {START_SECONDS:.0f} s")
        time.sleep(0.1)


def _wait_for_steps(run: Path, process: subprocess.Popen[bytes], steps: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while len(read_metrics(run / "metrics.jsonl")) < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run made no {steps} steps within {START_SECONDS:.0f} s")
        time.sleep(0.5)
