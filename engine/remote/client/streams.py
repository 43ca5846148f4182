"""The requests that the core is serving, and the results of each."""

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.remote.client.core import Core, CoreRequest
from asyncrl.engine.remote.client.responses import AbortedError, Inbox, Response, Scored

T = TypeVar("T")


@dataclass(slots=True)
class _Stream:
    request_id: str
    """Id towards the core, never used twice."""
    inbox: Inbox[Any]
    submitted: bool = False
    """True once the core knows it; before that it cannot be ended there."""
    restart: bool = False
    interrupted: bool = False
    """True once the core was asked to end it."""


@dataclass(slots=True, eq=False)
class Reader:
    """Reads one request after the other, a verification, then the response, until `interrupt`."""

    stream: _Stream | None = None
    interrupted: bool = False

    def interrupt(self) -> None:
        """End what is read: a response with all that was drawn, a verification without result."""
        self.interrupted = True
        if self.stream is not None:
            self.stream.inbox.interrupt()


class Streams:
    """Submits requests to the core and passes the results to their readers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[str, _Stream] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def chunks(
        self, request: GenerateRequest, seed: int, submitted: CoreRequest, reader: Reader
    ) -> AsyncGenerator[list[TokenChunk], None]:
        """Yield chunks of a response until its end, an interruption or `close`.

        Raises EngineError if the core failed, or lost the request.
        """
        responses = self._core.responses
        return self._items(
            request.request_id, submitted, reader, lambda: Response(request, seed, responses)
        )

    async def scored(self, name: str, submitted: CoreRequest, reader: Reader) -> Scored | None:
        """Return the table of a scoring request; None if it was interrupted or closed.

        Raises EngineError if the core failed, or lost the request.
        """
        async with aclosing(self._items(name, submitted, reader, Inbox[Scored])) as parts:
            async for (scored,) in parts:
                return scored
        return None

    async def _items(
        self, name: str, submitted: CoreRequest, reader: Reader, new_inbox: Callable[[], Inbox[T]]
    ) -> AsyncGenerator[list[T], None]:
        if reader.interrupted:
            return
        stream, inbox = self._new(new_inbox, reader)
        try:
            await self._submit(stream, submitted)
            while not inbox.over:
                await self._pass_on_interruption(reader, stream)
                try:
                    items = await inbox.take()
                except AbortedError:
                    if not stream.restart or reader.interrupted:
                        return
                    # `restart_unstarted` may have come before the core knew it.
                    await self._core.abort([stream.request_id])
                    del self._open[stream.request_id]
                    stream, inbox = self._new(new_inbox, reader)
                    await self._submit(stream, submitted)
                    continue
                if items:
                    yield items
        except EngineError:
            raise
        except Exception as error:
            # The engine put it into the inbox or raised it for this request: its core is gone.
            raise self._core.process.failure(f"request {name!r} was lost: {error!r}") from error
        finally:
            self._open.pop(stream.request_id, None)
            stream.inbox.put(None)
            if self._core.process.ended is None:
                await self._core.abort([stream.request_id])
                if not self._open:
                    self._core.meter.idle()

    async def _submit(self, stream: _Stream, request: CoreRequest) -> None:
        await self._core.submit(stream.request_id, stream.inbox, request)
        stream.submitted = True

    async def _pass_on_interruption(self, reader: Reader, stream: _Stream) -> None:
        if reader.interrupted and not stream.interrupted:
            stream.interrupted = True
            await self._core.interrupt(stream.request_id)

    def _new(self, new_inbox: Callable[[], Inbox[T]], reader: Reader) -> tuple[_Stream, Inbox[T]]:
        inbox = new_inbox()
        reader.stream = stream = _Stream(f"r{next(self._numbers)}", inbox)
        self._open[stream.request_id] = stream
        return stream, inbox

    async def restart_unstarted(self) -> None:
        """Resubmit what has no token yet: its prompt may have KV of the old weights."""
        unstarted = [stream for stream in self._open.values() if not stream.inbox.started]
        for stream in unstarted:
            stream.restart = True
            if not stream.submitted:  # its reader aborts it once it is
                stream.inbox.put(None)
        await self._core.abort([one.request_id for one in unstarted if one.submitted])

    def cut(self) -> None:
        """End every request; what was drawn is still delivered."""
        for stream in self._open.values():
            stream.restart = False
            stream.inbox.put(None)

    def fail(self, error: EngineError) -> None:
        """Raise an error to every reader."""
        for stream in self._open.values():
            stream.inbox.put(error)
