"""What does `asyncrl watch`, many times over, cost training?

    python -m benchmarks.watchers [--quick] [--watchers 100] [--json FILE]

One run trains throughout, without its web page; periods without any watcher and with many take
turns (`benchmarks.watched_run`). A watcher is the connection of `asyncrl watch`: it is sent a view
once a second, and asks again in time. Compared are wall time per step (mean of the pairs' ratios,
with its standard error) and CPU time of the controller. The watchers are one process on the same
cores; what one command in a terminal takes itself, which draws a panel, is measured apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from asyncrl.steering.status_stream import VIEW_SECONDS
from asyncrl.steering.watching import Watching
from benchmarks.harness import cpu_seconds, parser_of, pick, report
from benchmarks.watched_run import (
    SMOKE,
    Extent,
    median_cpu,
    overhead,
    periods_in_turns,
    raw_of,
    watched_run,
)

COMMAND_SECONDS = 20.0
"""How long one command in a terminal is looked at, from its first panel on."""
FIRST_PANEL_BYTES = 2000


@dataclass(frozen=True)
class Command:
    """One `asyncrl watch` in a terminal."""

    cpu: float
    """Share of a core, once it shows the run."""
    start_cpu_seconds: float
    """CPU time before that."""
    resident_bytes: int
    written_bytes_per_second: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--watchers", type=int)
    options = parser.parse_args(arguments)
    extent = pick(options, Extent(20, 30.0, 100, 10), Extent(5, 8.0, 100, 10), SMOKE)
    extent = replace(extent, watchers=options.watchers or extent.watchers)
    with watched_run(extent.steps, ["monitoring.web.enabled=false"]) as (run, controller):
        code = f"from benchmarks.watchers import watch; watch({str(run)!r}, {extent.watchers})"
        periods = periods_in_turns(run, extent, code, lambda: {"controller": controller})
        command = _command(run, 1.0 if options.smoke else COMMAND_SECONDS)
    on, off = (median_cpu(periods, "controller", watched=one) for one in (True, False))
    ratios = overhead(periods) | {
        "more_controller_cpu": on - off,
        "watchers_cpu": median_cpu(periods, "watchers", watched=True),
        "one_command_cpu": command.cpu,
    }
    report(options, "watchers", raw_of(periods) | {"command": asdict(command)}, ratios)
    return 0


def watch(run: str, count: int) -> None:
    """Be that many watchers, for ever. Prints `all watch` when each has had an answer."""
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
        return Command(used / seconds, start, resident, (written - shown) / seconds)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


if __name__ == "__main__":
    sys.exit(main())
