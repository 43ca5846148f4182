"""What do watchers cost training: `asyncrl watch` and the tabs of the web page, many times over?

    python -m benchmarks.watchers [--quick] [--watchers 100] [--json FILE]

One run trains throughout, and its steps change nothing. Periods without any watcher and with many
of one kind take turns in random order, so that what else the machine does falls on both alike. A
`command` is the connection of `asyncrl watch`: it is sent a view once a second, and asks again in
time. A `page` is what a browser tab is to the server: a stream of events, and each section of the
report fetched whenever it has changed. Compared are wall time per step (mean of the pairs' ratios,
with its standard error) and CPU time of the controller and of the web process. The watchers are one
process of the lowest priority on the same cores.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.steering.status_stream import VIEW_SECONDS
from asyncrl.steering.watching import Watching
from benchmarks.harness import cpu_seconds, parser_of, pick, report, run_command

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
PERIOD_STEPS = 2
"""A period has so many steps at least."""
START_SECONDS = 300.0
KINDS = ("commands", "pages")
WATCH = "--watch"
"""A process of watchers is started with this."""


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
    """Watchers in one process of the lowest priority, which says `all watch` when they do."""

    def __init__(self, kind: str, run: Path, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.watchers", WATCH, kind, str(run), str(count)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        if (said := self._process.stdout.readline()).strip() != "all watch":
            raise SystemExit(f"the watchers did not begin: {said!r}")

    def leave(self) -> None:
        self._process.kill()
        self._process.communicate()


def periods_in_turns(
    run: Path, extent: Extent, kind: str, pids: Callable[[], dict[str, int]]
) -> list[Period]:
    """Measure pairs of periods, with watchers of this kind and without."""
    chance, periods = random.Random(0), []
    for _ in range(extent.pairs):
        for count in chance.sample([0, extent.watchers], 2):
            audience = Audience(kind, run, count) if count else None
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


def _web_process(run: Path) -> dict[str, int]:
    """It starts with the first request."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"asyncrl.web.process" in command and str(run).encode() in command:
            return {"web": int(path.parent.name)}
    return {}


def _small(folder: Path) -> list[str]:
    from benchmarks.tiny_models import slow_settings  # imports torch, which watchers do not need

    return slow_settings(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--watchers", type=int)
    options = parser.parse_args(arguments)
    extent = pick(options, Extent(20, 30.0, 100), Extent(5, 12.0, 100), SMOKE)
    extent = replace(extent, watchers=options.watchers or extent.watchers)
    found = {}
    with (
        tempfile.TemporaryDirectory() as small,
        watched_run(extent.steps, _small(Path(small)) if options.smoke else ()) as (
            run,
            controller,
        ),
    ):
        for kind in KINDS:
            found[kind] = periods_in_turns(
                run, extent, kind, lambda: {"controller": controller} | _web_process(run)
            )
    ratios = {}
    for kind, periods in found.items():
        numbers = overhead(periods) | {
            "controller_cpu_with": median_cpu(periods, "controller", watched=True),
            "controller_cpu_without": median_cpu(periods, "controller", watched=False),
        }
        if kind == "pages":
            numbers["web_cpu_with"] = median_cpu(periods, "web", watched=True)
        ratios |= {f"{kind}_{name}": number for name, number in numbers.items()}
    raw = {kind: [asdict(one) for one in periods] for kind, periods in found.items()}
    report(options, "watchers", {"periods": raw}, ratios)
    return 0


def watch(kind: str, run: str, count: int) -> None:
    """Be that many watchers, for ever. Prints `all watch` when each has had an answer."""
    os.nice(19)
    watcher = {"commands": commands, "pages": pages}[kind]

    async def all_of_them() -> None:
        answered = [asyncio.Event() for _ in range(count)]
        async with asyncio.TaskGroup() as group:
            for number, event in enumerate(answered):
                group.create_task(later(VIEW_SECONDS * number / count, watcher(Path(run), event)))
            for event in answered:
                await event.wait()
            print("all watch", flush=True)

    async def later(seconds: float, watching: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(seconds)
        await watching

    asyncio.run(all_of_them())


async def commands(run: Path, answered: asyncio.Event) -> None:
    """One `asyncrl watch`."""
    watching = Watching(run)
    while await watching.view(print) is not None:
        answered.set()
    raise SystemExit("the run has ended")


async def pages(run: Path, answered: asyncio.Event) -> None:
    """One tab: the stream, and sections whose version has changed."""
    place = urllib.parse.urlsplit(json.loads((run / "run.json").read_text())["web"])
    assert place.hostname is not None
    assert place.port is not None

    async def ask(path: str, connection: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 22)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        return reader, writer

    shown = dict[str, str]()
    reader, writer = await ask("/api/events", "keep-alive")
    while line := await reader.readline():
        if line.startswith(b"data: "):
            answered.set()
            for name, version in json.loads(line[6:])["sections"].items():
                if shown.get(name) != version:
                    section, closing = await ask(f"/api/report/{name}", "close")
                    await section.read()
                    closing.close()
                    shown[name] = version
    writer.close()


if __name__ == "__main__":
    if sys.argv[1:2] == [WATCH]:
        watch(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    sys.exit(main())
