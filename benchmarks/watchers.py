"""What `asyncrl watch`, many times over, costs training.

    python -m benchmarks.watchers [--quick] [--watchers 100] [--json FILE]

One run trains throughout, without its web page. Periods without any watcher and periods with many
take turns in random order, so that what else the machine does falls on both alike. A watcher keeps
one connection and asks once a second, as `asyncrl watch` does. All watchers are one process of the
lowest priority, since they stand for people at other machines.

Measured in each period: wall time per step, and CPU time of the controller. On a machine that has
other work, the CPU time says more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.run.control import open_line
from asyncrl.run.watching import ASK_SECONDS
from benchmarks.report import write_json
from benchmarks.watched_run import SETTLE_SECONDS, cpu_seconds, watched_run
from monitoring.metrics_log import read_metrics
from wire.messages import control

ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Period:
    """What was measured in one period."""

    watchers: int
    steps: int
    step_seconds: float
    """Mean time from one finished step to the next."""
    controller_cpu: float
    """Share of a core."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--watchers", type=int, default=100)
    parser.add_argument("--json")
    given = parser.parse_args()
    pairs, seconds = (3, 8.0) if given.quick else (20, 30.0)
    with watched_run(10, ["monitoring.web.enabled=false"]) as (run, controller):
        periods = _measure(run, controller, given.watchers, pairs, seconds)
    _tell(periods, given.watchers, given.json)


def _measure(run: Path, controller: int, watchers: int, pairs: int, seconds: float) -> list[Period]:
    random_ = random.Random(0)
    periods = []
    for _ in range(pairs):
        for count in random_.sample([0, watchers], 2):
            audience = _audience(run, count) if count else None
            time.sleep(SETTLE_SECONDS)
            periods.append(_period(run, controller, count, seconds))
            if audience is not None:
                audience.kill()
                audience.wait()
            one = periods[-1]
            print(
                f"{one.watchers:4} watchers: {one.steps} steps, {one.step_seconds:.4f} s each; "
                f"controller {100 * one.controller_cpu:.1f} % of a core",
                flush=True,
            )
    return periods


def _period(run: Path, controller: int, count: int, seconds: float) -> Period:
    before, began, wall = cpu_seconds(controller), time.monotonic(), time.time()
    time.sleep(seconds)
    used = (cpu_seconds(controller) - before) / (time.monotonic() - began)
    times = [one.time for one in read_metrics(run / "metrics.jsonl") if one.time >= wall]
    return Period(count, len(times), (times[-1] - times[0]) / (len(times) - 1), used)


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
        line = open_line(run)
        await asyncio.sleep(ASK_SECONDS * number / count)
        while True:
            await line.send(control.StatusRequest())
            reply = await line.receive_within(ANSWER_SECONDS, what="the controller's answer")
            assert isinstance(reply, control.StatusReply)
            answered[number].set()
            await asyncio.sleep(ASK_SECONDS)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
        for event in answered:
            await event.wait()
        print("all watch", flush=True)


def _tell(periods: list[Period], watchers: int, path: str | None) -> None:
    turns = [periods[i : i + 2] for i in range(0, len(periods), 2)]
    pairs = [sorted(turn, key=lambda one: one.watchers) for turn in turns]
    slower = [with_.step_seconds / without.step_seconds - 1 for without, with_ in pairs]
    more = [with_.controller_cpu - without.controller_cpu for without, with_ in pairs]
    error = statistics.stdev(slower) / len(slower) ** 0.5
    print(
        f"{watchers} watchers: controller {100 * statistics.median(more):+.2f} % of a core; step "
        f"time {100 * statistics.mean(slower):+.1f} % (standard error {100 * error:.1f}, "
        f"{len(pairs)} pairs)"
    )
    if path:
        ratios = {
            "step_seconds_with_over_without": 1 + statistics.mean(slower),
            "standard_error": error,
            "more_controller_cpu": statistics.median(more),
        }
        write_json(path, "watchers", {"periods": [asdict(one) for one in periods]}, ratios)


if __name__ == "__main__":
    main()
