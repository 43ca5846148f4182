"""How often a file is written that many events change."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.controller import inbox
from asyncrl.controller.inbox import BURST, PacedWrites


def test_a_burst_is_written_once_more_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "PACE_SECONDS", 0.05)
    written: list[int] = []

    async def main() -> None:
        count, last = 0, asyncio.Event()

        def write() -> None:
            written.append(count)
            if count == 1000:
                last.set()

        writes = PacedWrites(write)
        for count in range(1, 1001):  # noqa: B007 - `write` reads it
            writes()
        assert written == list(range(1, BURST + 1))
        async with asyncio.timeout(60):
            await last.wait()
        await asyncio.sleep(0.2)
        assert written == [*range(1, BURST + 1), 1000], "nothing else has changed"

    asyncio.run(main())
