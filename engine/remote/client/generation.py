"""Generates responses: kept tokens are verified first, then the core draws the rest."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.remote.client.core import Core
from asyncrl.engine.remote.client.requests import Table, check_temperature, generation, verification
from asyncrl.engine.remote.client.streams import Reader, Streams
from asyncrl.engine.remote.client.verification import after_verification
from asyncrl.engine.requests import Limits, SeedStream
from asyncrl.rollout.trajectory import KeptTokens, Provenance


class Generation:
    """The `generate` calls of one engine.

    Args:
        core: of the engine.
        streams: its requests.
        limits: of requests.
        seeds: of requests without one.
    """

    def __init__(self, core: Core, streams: Streams, limits: Limits, seeds: SeedStream) -> None:
        self._core = core
        self._streams = streams
        self._limits = limits
        self._seeds = seeds
        self._readers: dict[str, list[Reader]] = {}
        """By request id: one, or more while earlier requests of this id are being left."""
        self._residual = 0

    @property
    def tokens_drawn(self) -> int:
        """Response tokens since the start; those that verification accepted are not drawn."""
        return self._core.responses.tokens + self._residual

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The response, until its end or an interruption.

        Raises:
            RequestError: the request cannot be served.
            EngineError: the core failed.
        """
        name = request.request_id
        self._limits.check_generate(request)
        check_temperature(name, request.sampling, self._core)
        reader = Reader()
        self._readers.setdefault(name, []).append(reader)
        try:
            async with aclosing(self._response(request, reader)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            # Only an interruption or `close` ends a request from this side while it is read.
            yield TokenChunk.empty_abort(request, self._core.policy_version)
        finally:
            readers = self._readers[name]
            readers.remove(reader)
            if not readers:
                del self._readers[name]

    def interrupt(self, request_id: str) -> None:
        """End a request; nothing happens when it has ended or is not known."""
        for reader in self._readers.get(request_id, ()):
            reader.interrupt()

    async def _response(
        self, request: GenerateRequest, reader: Reader
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks up to the last one, fewer if the reader is interrupted."""
        seed = self._seeds.seed_of(request.sampling)
        if request.kept is not None and len(request.kept):
            verified = await self._verify(request, request.kept, seed, reader)
            if verified is None:
                return
            first, request = verified
            if first is not None:
                self._residual += int((first.provenance == Provenance.SAMPLED).sum())
                yield first
                if first.finish_reason is not None:
                    return
        submitted = generation(request, seed)
        async with aclosing(self._streams.chunks(request, seed, submitted, reader)) as parts:
            async for chunks in parts:
                for chunk in chunks:
                    yield chunk

    async def _verify(
        self, request: GenerateRequest, kept: KeptTokens, seed: int, reader: Reader
    ) -> tuple[TokenChunk | None, GenerateRequest] | None:
        """Have the worker verify kept tokens; None when that was interrupted."""
        name = request.request_id
        submitted = verification(request, kept, seed)
        scored = await self._streams.scored(name, submitted, reader)
        if scored is None:
            return None
        table = Table.of(name, scored, request.sampling.top_k_logprobs)
        return after_verification(request, kept, table, seed, scored.policy_version)
