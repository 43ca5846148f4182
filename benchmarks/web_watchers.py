"""What a run's web page and its watchers cost training.

    python -m benchmarks.web_watchers [--quick] [--watchers 100] [--json FILE]

One run trains throughout. Periods without any watcher and periods with many take turns in random
order, so that what else the machine does falls on both alike. Each watcher is what a browser tab is
to the server: a stream of events, and each section of the report fetched whenever it has changed.
The watchers are one process of the lowest priority, since they stand for browsers of other
machines.

Measured in each period: steps, wall time per step, CPU time of the controller, of the web process
and of the watchers. The learning rate is next to nothing, so that steps stay alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import parser_of, write_json
from benchmarks.watched_run import (
    SETTLE_SECONDS,
    SMOKE_SECONDS,
    cpu_seconds,
    watch_for,
    watched_run,
)


@dataclass(frozen=True)
class Period:
    watchers: int
    seconds: float
    steps: int
    step_seconds: float
    """Mean time from one finished step to the next."""
    controller_cpu: float
    """Share of a core."""
    web_cpu: float
    watchers_cpu: float
    received_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--watchers", type=int, default=100)
    given = parser.parse_args(arguments)
    pairs, seconds = (5, 12.0) if given.quick else (20, 30.0)
    steps, settle = 15, SETTLE_SECONDS
    if given.smoke:
        given.watchers, pairs, seconds, steps, settle = 2, 2, SMOKE_SECONDS, 2, 0.0
    with watched_run(steps) as (run, controller):
        periods = _measure(run, controller, given.watchers, pairs, seconds, settle)
    _tell(periods, given)


def _measure(
    run: Path, controller: int, watchers: int, pairs: int, seconds: float, settle: float
) -> list[Period]:
    random_ = random.Random(0)
    url = json.loads((run / "run.json").read_text())["web"]
    periods = []
    for _ in range(pairs):
        for count in random_.sample([0, watchers], 2):
            audience = Audience(url, count) if count else None
            time.sleep(settle)
            periods.append(_period(run, controller, count, seconds, audience))
            if audience is not None:
                audience.leave()
            print(_line(periods[-1]), flush=True)
    return periods


def _period(
    run: Path, controller: int, count: int, seconds: float, audience: Audience | None
) -> Period:
    web = _web_process(run)
    mine = None if audience is None else audience.pid
    before, began = [_cpu(pid) for pid in (controller, web, mine)], time.time()
    times = watch_for(run, seconds)
    after, ended = [_cpu(pid) for pid in (controller, web, mine)], time.time()
    used = [(new - old) / (ended - began) for old, new in zip(before, after, strict=True)]
    return Period(
        watchers=count,
        seconds=ended - began,
        steps=len(times),
        step_seconds=(times[-1] - times[0]) / (len(times) - 1),
        controller_cpu=used[0],
        web_cpu=used[1],
        watchers_cpu=used[2],
        received_bytes=0 if audience is None else audience.received(),
    )


def _cpu(pid: int | None) -> float:
    return 0.0 if pid is None else cpu_seconds(pid)


def _web_process(run: Path) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"asyncrl.web.process" in command and str(run).encode() in command:
            return int(path.parent.name)
    return None


class Audience:
    """Watchers in a process of their own, of the lowest priority."""

    def __init__(self, url: str, count: int) -> None:
        code = f"from benchmarks.web_watchers import watch; watch({url!r}, {count})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if ready.strip() != "all watch":
            raise SystemExit(f"the watchers did not begin: {ready!r}")

    def received(self) -> int:
        self._process.send_signal(signal.SIGUSR1)
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def leave(self) -> None:
        self._process.kill()
        self._process.communicate()


def watch(url: str, count: int) -> None:
    """Be that many pages, for ever. Prints `all watch`, and bytes so far upon SIGUSR1."""
    os.nice(19)
    asyncio.run(_watch(url, count))


async def _watch(url: str, count: int) -> None:
    place = urllib.parse.urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    pages = [_Page(place.hostname, place.port) for _ in range(count)]
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGUSR1, lambda: print(sum(page.received for page in pages), flush=True)
    )
    async with asyncio.TaskGroup() as group:
        for page in pages:
            group.create_task(page.follow())
        for page in pages:
            await page.begun.wait()
        print("all watch", flush=True)


class _Page:
    """One tab: the stream, and sections whose version has changed."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._shown: dict[str, str] = {}
        self.begun = asyncio.Event()
        self.received = 0

    async def follow(self) -> None:
        reader, writer = await self._ask("/api/events")
        try:
            while line := await reader.readline():
                self.received += len(line)
                if line.startswith(b"data: "):
                    self.begun.set()
                    await self._refresh(json.loads(line[6:])["sections"])
        finally:
            writer.close()

    async def _refresh(self, versions: dict[str, str]) -> None:
        for name, version in versions.items():
            if self._shown.get(name) != version:
                reader, writer = await self._ask(f"/api/report/{name}", "close")
                self.received += len(await reader.read())
                writer.close()
                self._shown[name] = version

    async def _ask(
        self, path: str, connection: str = "keep-alive"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        return reader, writer


def _line(one: Period) -> str:
    return (
        f"{one.watchers:4} watchers: {one.steps} steps, {one.step_seconds:.4f} s each; CPU, % of a "
        f"core: controller {100 * one.controller_cpu:.1f}, web {100 * one.web_cpu:.1f}, watchers "
        f"{100 * one.watchers_cpu:.1f}"
    )


def _tell(periods: list[Period], given: argparse.Namespace) -> None:
    watchers = given.watchers

    def median(name: str, count: int) -> float:
        return statistics.median(getattr(one, name) for one in periods if one.watchers == count)

    turns = [periods[i : i + 2] for i in range(0, len(periods), 2)]
    pairs = [sorted(turn, key=lambda one: one.watchers) for turn in turns]
    slower = [with_.step_seconds / without.step_seconds - 1 for without, with_ in pairs]
    controller = median("controller_cpu", watchers) - median("controller_cpu", 0)
    spread = statistics.stdev(slower) / len(slower) ** 0.5
    print(
        f"{watchers} watchers: step time {100 * statistics.mean(slower):+.1f} % (standard error "
        f"{100 * spread:.1f}, {len(pairs)} pairs), controller "
        f"{100 * controller:+.2f} % of a core, "
        f"web process {100 * median('web_cpu', watchers):.1f} % of a core at low priority"
    )
    if given.json:
        ratios = {
            "step_seconds_with_over_without": 1 + statistics.mean(slower),
            "standard_error": spread,
            "controller_cpu_with": median("controller_cpu", watchers),
            "controller_cpu_without": median("controller_cpu", 0),
            "web_cpu_with": median("web_cpu", watchers),
        }
        raw = {"periods": [asdict(one) for one in periods]}
        write_json(given.json, "web_watchers", raw, ratios, smoke=given.smoke)


if __name__ == "__main__":
    main()
