"""One producer for all who watch the page."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from served_page import FakeRun

from asyncrl.web import feed
from asyncrl.web.feed import Feed
from asyncrl.web.sections import Section


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ASK_SECONDS", 0.1)


class NoSections:
    """Nothing is drawn."""

    def drawn(self) -> dict[str, Section]:
        return {}


def test_the_first_snapshot_of_a_new_watcher_is_new() -> None:
    """Not the last one of whoever watched before, hours ago."""

    async def first(found: Feed) -> int:
        async with contextlib.aclosing(found.watch()) as snapshots:
            snapshot = msgspec.json.decode(await anext(snapshots))
        step: int = snapshot["status"]["step"]
        return step

    source = FakeRun()

    async def watch_twice() -> None:
        with ThreadPoolExecutor(1) as disk:
            found = Feed(source, NoSections(), disk)
            assert await first(found) == 3
            producer = found._producer
            assert producer is not None
            await asyncio.wait_for(producer, 60)
            source.status_now = {"step": 100}
            assert await first(found) == 100
            await found.close()

    asyncio.run(watch_twice())


def test_a_hundred_watchers_share_one_question_and_one_snapshot() -> None:
    answers = asyncio.Semaphore(0)

    class Gated(FakeRun):
        async def status(self) -> dict[str, Any]:
            await answers.acquire()
            return await super().status()

    async def watch_together() -> None:
        source = Gated()
        with ThreadPoolExecutor(1) as disk:
            found = Feed(source, NoSections(), disk)
            pages = [found.watch() for _ in range(100)]
            for asked in (1, 2, 3):
                answers.release()
                async with asyncio.timeout(60):
                    shown = await asyncio.gather(*(anext(page) for page in pages))
                assert len({id(snapshot) for snapshot in shown}) == 1
                assert source.asked == asked
            for page in pages:
                await page.aclose()
            await found.close()

    asyncio.run(watch_together())
