"""Server-sent events: a stream of snapshots, for one watcher."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asyncrl.web.feed import Feed


class EventStream(Response):
    """`event: snapshot` with JSON, for as long as the watcher takes them."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the watcher goes away or the feed ends."""
        left = asyncio.create_task(_left(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({left, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._feed.watch()) as snapshots:
            async for snapshot in snapshots:
                body = b"event: snapshot\ndata: " + snapshot + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"event: end\ndata: {}\n\n"})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
