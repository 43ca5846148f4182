"""Stands for a controller: serves the page of the run folder that it is given, until killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from asyncrl.launch.records import ProcessRecords
from asyncrl.monitoring.config import WebConfig
from asyncrl.web.serving import WebPage


async def main(run: Path) -> None:
    page = WebPage(WebConfig(), run, ProcessRecords(run), lambda why: print(why, flush=True))
    print(page.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
