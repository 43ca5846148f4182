"""The requests that vLLM is serving, and the steps that come back for each."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from engine.errors import EngineError
from engine.protocol import GenerateRequest
from engine.vllm.client.core import Core, CoreRequest
from engine.vllm.client.steps import AbortedError, Step, StepQueue, StopWatch


@dataclass(slots=True)
class _Stream:
    """One request of vLLM's."""

    request_id: str
    """Ours towards vLLM: never used twice."""
    queue: StepQueue
    restart: bool = False
    """Aborted to be submitted again."""

    def cut(self) -> None:
        """End it; what was drawn is still handed over."""
        self.restart = False
        self.queue.put(None)


@dataclass(slots=True)
class Reader:
    """Somebody who reads steps, of one request after the other: a verification, then the response.

    `interrupt` ends the request being read, and every later one before it begins.
    """

    stream: _Stream | None = None
    interrupted: bool = False

    def interrupt(self) -> None:
        """End what is read; steps that have come are still handed over."""
        self.interrupted = True
        if self.stream is not None:
            self.stream.cut()


class Streams:
    """Submits requests to the core and hands their steps to their readers.

    Args:
        core: gets the requests.
        chunk_tokens: a reader is woken for at least so many tokens.
    """

    def __init__(self, core: Core, chunk_tokens: int) -> None:
        self._core = core
        self._chunk_tokens = chunk_tokens
        self._open: dict[str, _Stream] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def steps(
        self,
        name: str,
        request: CoreRequest,
        reader: Reader,
        continued: GenerateRequest | None = None,
    ) -> AsyncGenerator[list[Step], None]:
        """Steps of one request until its end; ends early when it is interrupted or closed.

        Args:
            name: of the request, for errors.
            request: as vLLM takes it.
            reader: gets the steps.
            continued: the request whose tokens are drawn, for its stop strings; None: it only
                scores.

        Raises:
            EngineError: vLLM failed, or lost the request `name`.
        """
        process = self._core.process
        if reader.interrupted:
            return
        stream = reader.stream = self._new(continued)
        try:
            await self._core.submit(stream.request_id, stream.queue, request)
            while True:
                try:
                    steps = await stream.queue.take()
                except AbortedError:
                    if not stream.restart:
                        return
                    del self._open[stream.request_id]
                    stream = reader.stream = self._new(continued)
                    await self._core.submit(stream.request_id, stream.queue, request)
                    continue
                yield steps
                if steps and steps[-1].finish_reason is not None:
                    return
        except EngineError:
            raise
        except Exception as error:
            # vLLM put it into the queue or raised it for this request: its core is gone.
            raise process.failure(f"request {name!r} was lost: {error!r}") from error
        finally:
            self._open.pop(stream.request_id, None)
            if process.ended is None:
                await self._core.abort([stream.request_id])
                if not self._open:
                    process.vllm.meter.idle()

    async def scored_step(self, name: str, request: CoreRequest, reader: Reader) -> Step | None:
        """The step that scored a scoring request; None when it was interrupted or closed."""
        async with aclosing(self.steps(name, request, reader)) as parts:
            async for steps in parts:
                for step in steps:
                    if step.scored_ids is not None:
                        return step
        return None

    def _new(self, continued: GenerateRequest | None) -> _Stream:
        watch = None if continued is None else StopWatch.of(continued)
        stream = _Stream(f"r{next(self._numbers)}", StepQueue(self._chunk_tokens, watch))
        self._open[stream.request_id] = stream
        return stream

    def flush(self) -> None:
        """Hand every step that has come to its reader."""
        for stream in self._open.values():
            stream.queue.flush()

    async def restart_unstarted(self) -> None:
        """Submit again what has no token yet: its prompt may have KV of the old weights."""
        unstarted = [stream for stream in self._open.values() if not stream.queue.started]
        for stream in unstarted:
            stream.restart = True
        await self._core.abort([stream.request_id for stream in unstarted])

    def cut(self) -> None:
        """End every request; steps that have come are still handed over."""
        for stream in self._open.values():
            stream.cut()

    def fail(self, error: EngineError) -> None:
        """Raise an error to every reader."""
        for stream in self._open.values():
            stream.queue.put(error)
