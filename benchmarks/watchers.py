"""What `asyncrl watch`, many times over, costs training.

    python -m benchmarks.watchers [--quick] [--watchers 100] [--json FILE]

One run trains throughout, without its web page. Periods without any watcher and periods with many
take turns in random order, so that what else the machine does falls on both alike. A watcher is the
connection of `asyncrl watch`: it is sent a view once a second, and asks again in time.

Measured in each period: wall time per step, and CPU time of the controller and of the watchers. The
watchers are one process of the lowest priority on the same cores, so the time per step includes
what they do themselves. That is little compared with as many terminals, each of which draws a
panel: `asyncrl watch` runs on the controller's machine, and its own CPU time is measured apart, on
one command in a terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pty
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.steering.status_stream import VIEW_SECONDS
from asyncrl.steering.watching import Watching
from benchmarks.harness import parser_of, write_json
from benchmarks.watched_run import (
    SETTLE_SECONDS,
    SMOKE_SECONDS,
    cpu_seconds,
    watch_for,
    watched_run,
)

COMMAND_SECONDS = 20.0
"""How long one command in a terminal is looked at, from its first panel on."""
FIRST_PANEL_BYTES = 2000


@dataclass(frozen=True)
class Period:
    watchers: int
    steps: int
    step_seconds: float
    """Mean time from one finished step to the next."""
    controller_cpu: float
    """Share of a core."""
    watchers_cpu: float
    """Of the process that all watchers are."""


@dataclass(frozen=True)
class Command:
    cpu: float
    """Share of a core, once it shows the run."""
    start_cpu_seconds: float
    """CPU time before that."""
    resident_bytes: int
    written_bytes_per_second: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--watchers", type=int, default=100)
    given = parser.parse_args(arguments)
    pairs, seconds = (5, 8.0) if given.quick else (20, 30.0)
    steps, command_seconds, settle = 10, COMMAND_SECONDS, SETTLE_SECONDS
    if given.smoke:
        given.watchers, pairs, seconds, steps, command_seconds, settle = (
            2,
            2,
            SMOKE_SECONDS,
            2,
            1.0,
            0.0,
        )
    with watched_run(steps, ["monitoring.web.enabled=false"]) as (run, controller):
        periods = _measure(run, controller, given.watchers, pairs, seconds, settle)
        command = _command(run, command_seconds)
    _tell(periods, command, given)


def _measure(
    run: Path, controller: int, watchers: int, pairs: int, seconds: float, settle: float
) -> list[Period]:
    random_ = random.Random(0)
    periods = []
    for _ in range(pairs):
        for count in random_.sample([0, watchers], 2):
            audience = _audience(run, count) if count else None
            time.sleep(settle)
            periods.append(_period(run, controller, audience, count, seconds))
            if audience is not None:
                audience.kill()
                audience.communicate()
            one = periods[-1]
            print(
                f"{one.watchers:4} watchers: {one.steps} steps, {one.step_seconds:.4f} s each; "
                f"CPU, % of a core: controller {100 * one.controller_cpu:.1f}, watchers "
                f"{100 * one.watchers_cpu:.1f}",
                flush=True,
            )
    return periods


def _period(
    run: Path, controller: int, audience: subprocess.Popen[str] | None, count: int, seconds: float
) -> Period:
    pids = [controller] if audience is None else [controller, audience.pid]
    before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
    times = watch_for(run, seconds)
    after, took = [cpu_seconds(pid) for pid in pids], time.monotonic() - began
    used = [(new - old) / took for old, new in zip(before, after, strict=True)]
    step_seconds = (times[-1] - times[0]) / (len(times) - 1)
    return Period(count, len(times), step_seconds, used[0], used[1] if audience else 0.0)


def _audience(run: Path, count: int) -> subprocess.Popen[str]:
    code = f"from benchmarks.watchers import watch; watch({str(run)!r}, {count})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if (said := process.stdout.readline()).strip() != "all watch":
        raise SystemExit(f"the watchers did not begin: {said!r}")
    return process


def watch(run: str, count: int) -> None:
    """Be that many watchers, for ever. Prints `all watch` when each has had an answer."""
    os.nice(19)
    asyncio.run(_watch(Path(run), count))


async def _watch(run: Path, count: int) -> None:
    answered = [asyncio.Event() for _ in range(count)]

    async def one(number: int) -> None:
        await asyncio.sleep(VIEW_SECONDS * number / count)
        watching = Watching(run)
        while await watching.view(print) is not None:
            answered[number].set()
        raise SystemExit("the run has ended")

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
        for event in answered:
            await event.wait()
        print("all watch", flush=True)


def _command(run: Path, seconds: float) -> Command:
    """What one `asyncrl watch` in a terminal takes itself."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "asyncrl", "watch", run.name, "--runs", str(run.parent)]
    terminal = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=terminal)
    os.close(theirs)
    written = 0

    def read() -> None:
        nonlocal written
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 1 << 16):
                written += len(piece)

    threading.Thread(target=read, daemon=True).start()
    try:
        deadline = time.monotonic() + 120
        while written < FIRST_PANEL_BYTES:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("`asyncrl watch` showed no panel")
            time.sleep(0.1)
        start, shown = cpu_seconds(process.pid), written
        time.sleep(seconds)
        used = cpu_seconds(process.pid) - start
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        written_per_second = (written - shown) / seconds
        return Command(used / seconds, start, resident, written_per_second)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _tell(periods: list[Period], command: Command, given: argparse.Namespace) -> None:
    watchers = given.watchers
    turns = [periods[i : i + 2] for i in range(0, len(periods), 2)]
    pairs = [sorted(turn, key=lambda one: one.watchers) for turn in turns]
    slower = [with_.step_seconds / without.step_seconds - 1 for without, with_ in pairs]
    more = [with_.controller_cpu - without.controller_cpu for without, with_ in pairs]
    error = statistics.stdev(slower) / len(slower) ** 0.5
    print(
        f"{watchers} watchers: controller {100 * statistics.median(more):+.2f} % of a core; step "
        f"time {100 * statistics.mean(slower):+.1f} % (standard error {100 * error:.1f}, "
        f"{len(pairs)} pairs), of which they take themselves "
        f"{100 * statistics.median(with_.watchers_cpu for _, with_ in pairs):.1f} % of a core"
    )
    print(
        f"one `asyncrl watch` in a terminal: {100 * command.cpu:.1f} % of a core, "
        f"{command.resident_bytes / 2**20:.0f} MiB, {command.start_cpu_seconds:.1f} s of CPU to "
        "start"
    )
    if given.json:
        ratios = {
            "step_seconds_with_over_without": 1 + statistics.mean(slower),
            "standard_error": error,
            "more_controller_cpu": statistics.median(more),
            "watchers_cpu": statistics.median(with_.watchers_cpu for _, with_ in pairs),
            "one_command_cpu": command.cpu,
        }
        raw = {"periods": [asdict(one) for one in periods], "command": asdict(command)}
        write_json(given.json, "watchers", raw, ratios, smoke=given.smoke)


if __name__ == "__main__":
    main()
