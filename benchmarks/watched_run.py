"""A run that trains on while benchmarks watch it, with and without an audience in turns.

Its steps change nothing. Periods without any watcher and periods with many are in random order, so
that what else the machine does falls on both alike.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.monitoring.records.metrics_log import read_metrics
from benchmarks.harness import cpu_seconds, run_command

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
PERIOD_STEPS = 2
"""A period has so many steps at least."""
START_SECONDS = 300.0


@contextmanager
def watched_run(steps: int, more: Sequence[str] = ()) -> Iterator[tuple[Path, int]]:
    """The run's folder and its controller's process id, after so many steps; both go afterwards."""
    with tempfile.TemporaryDirectory(prefix="watchers-") as folder:
        run = Path(folder) / "watched"
        settings = [
            f"run.directory={folder}", "run.name=watched", "run.steps=1000000",
            "trainer.learning_rate=1e-12", "trainer.checkpoint_every=1000000",
            "evaluation.prompts=1", "monitoring.live=off", *more,
        ]  # fmt: skip
        process = subprocess.Popen(run_command(EXAMPLE, settings), stdout=subprocess.DEVNULL)
        try:
            _wait_for_steps(run, process, steps)
            yield run, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def own_bytes(pid: int) -> int:
    """Memory of a process that is no file's; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Extent:
    """How long it is watched."""

    pairs: int
    """Of a period with watchers and one without."""
    seconds: float
    watchers: int
    steps: int = 15
    """Before the first period."""
    settle: float = 3.0
    """Seconds between a change of the watchers and the period that is measured."""


SMOKE = Extent(2, 0.5, 2, steps=2, settle=0.0)


@dataclass(frozen=True)
class Period:
    watchers: int
    steps: int
    step_seconds: float
    """Mean time from one finished step to the next."""
    cpu: dict[str, float]
    """Share of a core, by process."""


class Audience:
    """Watchers in one process of the lowest priority; `code` says `all watch` when they do."""

    def __init__(self, code: str) -> None:
        command = [sys.executable, "-c", f"import os; os.nice(19); {code}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        if (said := self._process.stdout.readline()).strip() != "all watch":
            raise SystemExit(f"the watchers did not begin: {said!r}")

    def leave(self) -> None:
        self._process.kill()
        self._process.communicate()


def periods_in_turns(
    run: Path, extent: Extent, code: str, pids: Callable[[], dict[str, int]]
) -> list[Period]:
    """Measure pairs of periods, with the watchers of this code and without."""
    chance, periods = random.Random(0), []
    for _ in range(extent.pairs):
        for count in chance.sample([0, extent.watchers], 2):
            audience = Audience(code) if count else None
            time.sleep(extent.settle)
            watched = pids() | ({"watchers": audience.pid} if audience else {})
            before, began = {n: cpu_seconds(pid) for n, pid in watched.items()}, time.monotonic()
            times = _watch_for(run, extent.seconds)
            took = time.monotonic() - began
            cpu = {n: (cpu_seconds(pid) - before[n]) / took for n, pid in watched.items()}
            seconds = (times[-1] - times[0]) / (len(times) - 1)
            periods.append(Period(count, len(times), seconds, cpu))
            if audience is not None:
                audience.leave()
            print(json.dumps(asdict(periods[-1])), flush=True)
    return periods


def overhead(periods: Sequence[Period]) -> dict[str, float]:
    """The step time with watchers over that without: mean over the pairs, and standard error."""
    turns = [periods[i : i + 2] for i in range(0, len(periods), 2)]
    pairs = [sorted(turn, key=lambda one: one.watchers) for turn in turns]
    slower = [with_.step_seconds / without.step_seconds for without, with_ in pairs]
    return {
        "step_seconds_with_over_without": statistics.mean(slower),
        "standard_error": statistics.stdev(slower) / len(slower) ** 0.5,
    }


def median_cpu(periods: Sequence[Period], name: str, *, watched: bool) -> float:
    """Of a process, over periods with watchers or without."""
    return statistics.median(one.cpu[name] for one in periods if bool(one.watchers) == watched)


def raw_of(periods: Sequence[Period]) -> dict[str, Any]:
    return {"periods": [asdict(one) for one in periods]}


def _watch_for(run: Path, seconds: float) -> list[float]:
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
