"""What do a run's web page and its watchers cost training?

    python -m benchmarks.web_watchers [--quick] [--watchers 100] [--json FILE]

One run trains throughout; periods without any watcher and with many take turns
(`benchmarks.watched_run`). Each watcher is what a browser tab is to the server: a stream of events,
and each section of the report fetched whenever it has changed. Compared are wall time per step
(mean of the pairs' ratios, with its standard error), and CPU time of the controller and of the web
process. The watchers are one process of the lowest priority, since they stand for browsers
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.parse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import parser_of, pick, report
from benchmarks.watched_run import (
    SMOKE,
    Extent,
    median_cpu,
    overhead,
    periods_in_turns,
    raw_of,
    watched_run,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--watchers", type=int)
    options = parser.parse_args(arguments)
    extent = pick(options, Extent(20, 30.0, 100), Extent(5, 12.0, 100), SMOKE)
    extent = replace(extent, watchers=options.watchers or extent.watchers)
    with watched_run(extent.steps) as (run, controller):
        url = json.loads((run / "run.json").read_text())["web"]
        code = f"from benchmarks.web_watchers import watch; watch({url!r}, {extent.watchers})"
        periods = periods_in_turns(
            run, extent, code, lambda: {"controller": controller} | _web_process(run)
        )
    ratios = overhead(periods) | {
        "controller_cpu_with": median_cpu(periods, "controller", watched=True),
        "controller_cpu_without": median_cpu(periods, "controller", watched=False),
        "web_cpu_with": median_cpu(periods, "web", watched=True),
    }
    report(options, "web_watchers", raw_of(periods), ratios)
    return 0


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


def watch(url: str, count: int) -> None:
    """Be that many pages, for ever. Prints `all watch` when each has its first event."""
    asyncio.run(_watch(url, count))


async def _watch(url: str, count: int) -> None:
    place = urllib.parse.urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    pages = [_Page(place.hostname, place.port) for _ in range(count)]
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

    async def follow(self) -> None:
        """Read the stream until it ends."""
        reader, writer = await self._ask("/api/events")
        try:
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    self.begun.set()
                    await self._refresh(json.loads(line[6:])["sections"])
        finally:
            writer.close()

    async def _refresh(self, versions: dict[str, str]) -> None:
        for name, version in versions.items():
            if self._shown.get(name) != version:
                reader, writer = await self._ask(f"/api/report/{name}", "close")
                await reader.read()
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


if __name__ == "__main__":
    sys.exit(main())
