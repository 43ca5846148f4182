"""VllmEngine: vLLM behind the `Engine` protocol, with the cache of rollouts drafting inside it.

    this process                                         vLLM's engine-core process
    generate ──► AsyncLLM ── requests ──────────────────► scheduler, model, CacheDrafter
    StepQueue ◄─ StepProcessor ◄── steps, each stamped ◄── with the version that drew it
    stage_weights ─► manifest by rpc ───────────────────► WorkerWeights reads the published file
    install_weights ─► version by rpc, while paused ────► and loads its copy

    output task (AsyncLLM's)  consumes: messages of the core · produces: steps, one queue a request
                              waits for: the core · unblocked by: its death too
    core watch (Core)         waits for: the core process to end · then wakes every consumer

Which version drew a token is stamped in the core, where weights change only while generation is
paused; nothing here guesses it. Requests that have not begun when the weights change begin again
under the new ones: their prompt's KV would be of the old version. Prefix KV is shared by requests
of one version only (the version is the salt of its hash); running requests keep theirs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cache.config import CacheConfig
from cache.place import CachePlace
from engine.config import EngineConfig
from engine.errors import EngineError, EngineStartError
from engine.protocol import (
    GenerateRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TokenChunk,
)
from engine.requests import Limits
from engine.vllm.client.core import Core
from engine.vllm.client.kept import settle, warm_up
from engine.vllm.client.requests import (
    Table,
    check_temperature,
    empty_end,
    generate_arguments,
    score_arguments,
    score_of,
    unscored,
    verify_arguments,
)
from engine.vllm.client.steps import AbortedError, ChunkBuilder, Step, StepQueue
from engine.weights import ModelShapes, not_staged
from rollout.trajectory import KeptTokens, Provenance
from wire.records import EngineStats, TokenCounts
from wire.weights.layout import WeightManifest

T = TypeVar("T")

_SCORE_PRIORITY = -1
"""Before primary work: somebody waits for all of it."""
_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Stream:
    """A request that vLLM is serving; given again when it had not begun at an update."""

    request_id: str
    """Ours towards vLLM: never used twice."""
    queue: StepQueue
    again: bool = False

    def cut(self) -> None:
        """End it; what was drawn is still handed over."""
        self.again = False
        self.queue.put(None)


@dataclass(slots=True)
class _Serving:
    """A `generate` that somebody reads."""

    stream: _Stream | None = None
    """What vLLM is serving of it now: a verification, or the response itself."""
    interrupted: bool = False


class VllmEngine:
    """The generator on vLLM; satisfies `engine.protocol.Engine`. One event loop."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        cache_config: CacheConfig,
        seed: int,
        place: CachePlace | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._cache_config = cache_config
        self._place = place or CachePlace()
        self._seed = seed
        self._seeds = np.random.default_rng(seed)
        self._core: Core | None = None
        self._ended: EngineError | None = None
        self._shapes = ModelShapes({}, frozenset(), {})
        self._staged: int | None = None
        self._limits = Limits(config.max_model_len, 1, config.top_k_logprobs)
        self._streams: dict[str, _Stream] = {}
        self._serving: dict[str, _Serving] = {}
        self._numbers = itertools.count()
        self._staging = asyncio.Lock()
        self._control = asyncio.Lock()
        self._paused = False
        self._version = 0
        self._tokens = 0

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineStartError, quoting vLLM's log."""
        if self._core is not None or self._ended is not None:
            raise EngineStartError("the engine was started before; make a new one")
        self._core = core = Core(self._config, self._end)
        try:
            self._shapes = await asyncio.to_thread(ModelShapes.of_path, self._model_path)
            await asyncio.gather(
                core.start(self._model_path, self._cache_config, self._seed, self._place),
                asyncio.to_thread(warm_up),
            )
        except EngineError as error:
            self._ended = error
            await self._free()
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(f"vLLM could not be started: {error}") from error
        self._limits = Limits(
            self._config.max_model_len, core.vllm.vocab_size, self._config.top_k_logprobs
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response; closing the iterator aborts the request.

        Raises:
            RequestError: the request cannot be served (at the first chunk asked for).
            EngineError: vLLM is not running, or died; the end of its log is quoted.
        """
        self._running()
        self._limits.check_generate(request)
        check_temperature(request.request_id, request.sampling)
        serving = self._serving[request.request_id] = _Serving()
        try:
            async with aclosing(self._served(request, serving)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._serving.pop(request.request_id, None)

    async def interrupt(self, request_id: str) -> None:
        """End a request; its stream reports all steps that have come, then `abort`."""
        self._running()
        serving = self._serving.get(request_id)
        if serving is not None:
            serving.interrupted = True
            if serving.stream is not None:
                serving.stream.cut()

    async def _served(
        self, request: GenerateRequest, serving: _Serving
    ) -> AsyncGenerator[TokenChunk, None]:
        seed = self._seed_of(request.sampling)
        if request.kept is not None and len(request.kept):
            verified = await self._verified(request, request.kept, seed, serving)
            if verified is None:
                yield empty_end(request, self._version)
                return
            first, request = verified
            if first is not None:
                self._tokens += int((first.provenance != Provenance.VERIFIED).sum())
                yield first
                if first.finish_reason is not None:
                    return
        builder = ChunkBuilder(request.request_id, request.sampling.top_k_logprobs)
        arguments = generate_arguments(request, seed, self._limits.vocab_size)
        stream = self._steps(request.request_id, *arguments, request.priority, serving)
        async with aclosing(stream) as parts:
            async for steps in parts:
                for chunk in builder.chunks(steps):
                    self._tokens += len(chunk.tokens)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        # Only `interrupt` and `close` end a request from this side while somebody reads it.
        yield empty_end(request, self._version)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens, all under one policy version.

        They wait for free slots, before all waiting generation. While the engine is paused
        nothing can be scored: vLLM pauses as a whole.

        Raises:
            RequestError: a request cannot be scored; none of them was.
            EngineError: the engine is paused, or vLLM died.
        """
        self._running()
        for request in requests:
            self._limits.check_score(request)
            check_temperature(request.request_id, request.sampling)
        if self._paused and requests:
            raise EngineError("the engine is paused: vLLM cannot score now, resume it first")
        scores = await _gather([self._score(request) for request in requests])
        while len({score.policy_version for score in scores}) > 1:
            newest = max(score.policy_version for score in scores)
            stale = [i for i, score in enumerate(scores) if score.policy_version < newest]
            again = await _gather([self._score(requests[i]) for i in stale])
            for i, score in zip(stale, again, strict=True):
                scores[i] = score
        return scores

    async def _verified(
        self, request: GenerateRequest, kept: KeptTokens, seed: int, serving: _Serving
    ) -> tuple[TokenChunk | None, GenerateRequest] | None:
        """Score and judge kept tokens (see `engine.vllm.client.kept`); None when that was ended."""
        name, vocab_size = request.request_id, self._limits.vocab_size
        arguments = verify_arguments(request, kept, seed, vocab_size)
        step = await self._scored(name, *arguments, request.priority, serving)
        if step is None:
            return None
        table = Table.of(name, step, request.sampling.top_k_logprobs, vocab_size)
        return settle(request, kept, table, seed, step.policy_version)

    async def _score(self, request: ScoreRequest) -> Score:
        if not len(request.tokens):
            return unscored(request, self._version)
        seed, vocab_size = self._seed_of(request.sampling), self._limits.vocab_size
        arguments = score_arguments(request, seed, vocab_size)
        step = await self._scored(request.request_id, *arguments, _SCORE_PRIORITY, _Serving())
        if step is None:
            raise EngineError(
                f"request {request.request_id!r}: the engine was closed while scoring"
            )
        return score_of(request, step, vocab_size)

    async def _scored(
        self,
        name: str,
        tokens: list[int],
        params: dict[str, Any],
        priority: int,
        serving: _Serving,
    ) -> Step | None:
        """The only step of a scoring request; None when it was interrupted, or all closed."""
        stream = self._steps(name, tokens, params, priority, serving)
        async with aclosing(stream) as parts:
            async for steps in parts:
                for step in steps:
                    if step.scored_ids is not None:
                        return step
        return None

    def _seed_of(self, sampling: SamplingParams) -> int:
        if sampling.seed is None:
            return int(self._seeds.integers(0, 1 << 63))
        return sampling.seed & _SEED_MASK

    async def _steps(
        self,
        name: str,
        tokens: list[int],
        params: dict[str, Any],
        priority: int,
        serving: _Serving,
    ) -> AsyncGenerator[list[Step], None]:
        """Steps of one request until its end; ends early when interrupted or closed."""
        core = self._running()
        if serving.interrupted:
            return
        stream = serving.stream = self._new_stream()
        try:
            await self._submit(core, stream, tokens, params, priority)
            while True:
                try:
                    steps = await stream.queue.take()
                except AbortedError:
                    if not stream.again:
                        return
                    del self._streams[stream.request_id]
                    stream = serving.stream = self._new_stream()
                    await self._submit(core, stream, tokens, params, priority)
                    continue
                yield steps
                if steps and steps[-1].finish_reason is not None:
                    return
        except EngineError:
            raise
        except Exception as error:
            # Whatever vLLM put into the queue or raised for this request: its core is gone.
            raise core.failure(f"request {name!r} was lost: {error!r}") from error
        finally:
            self._streams.pop(stream.request_id, None)
            if self._ended is None:
                await core.abort([stream.request_id])
                if not self._streams:
                    core.vllm.meter.idle()

    def _new_stream(self) -> _Stream:
        stream = _Stream(f"r{next(self._numbers)}", StepQueue(self._config.vllm.chunk_tokens))
        self._streams[stream.request_id] = stream
        return stream

    async def _submit(
        self, core: Core, stream: _Stream, tokens: list[int], params: dict[str, Any], priority: int
    ) -> None:
        self._running()
        await core.submit(
            stream.request_id,
            stream.queue,
            tokens,
            params,
            priority=priority,
            salt=f"version {self._version}",
        )

    async def pause(self) -> None:
        """Stop drawing tokens and report what was drawn; running requests stay. Idempotent."""
        async with self._control:
            core = self._running()
            if not self._paused:
                await self._stop_drawing(core)
                self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        async with self._control:
            core = self._running()
            if self._paused:
                await self._draw_on(core)
                self._paused = False

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Have vLLM's worker copy published weights into its staging memory; generation continues.

        Raises:
            WeightsSupersededError: newer weights were published over these; nothing is staged.
            WeightsError: the weights do not fit the model, cannot be read or have values that are
                not finite; nothing is staged.
            EngineError: vLLM failed.
        """
        async with self._staging:
            core, self._staged = self._running(), None
            self._shapes.check(manifest)
            await core.stage(manifest)
            self._staged = manifest.policy_version

    async def install_weights(self, policy_version: int) -> None:
        """Replace the weights between two steps; running requests continue with the KV they have.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
            EngineError: vLLM failed during the installation; the engine has ended.
        """
        async with self._staging, self._control:
            core = self._running()
            if self._staged != policy_version:
                raise not_staged(policy_version, self._staged)
            try:
                if not self._paused:
                    await self._stop_drawing(core)
                await core.install(policy_version)
                self._version, self._staged = policy_version, None
                await self._begin_again(core)
                if not self._paused:
                    await self._draw_on(core)
            except EngineError as error:
                self._end(error)
                raise

    async def _begin_again(self, core: Core) -> None:
        """What has no token yet may have KV of the old weights, under the old salt."""
        waiting = [stream for stream in self._streams.values() if not stream.queue.started]
        for stream in waiting:
            stream.again = True
        await core.abort([stream.request_id for stream in waiting])

    async def _stop_drawing(self, core: Core) -> None:
        await core.pause()
        for stream in self._streams.values():
            stream.queue.flush()

    async def _draw_on(self, core: Core) -> None:
        await core.resume()
        if self._streams:
            core.vllm.meter.busy()

    async def save_cache(self) -> int:
        """Write the snapshot of the cache, if it has a place for one; returns its bytes."""
        return await self._running().save_cache()

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the last step."""
        vllm = self._running().vllm
        meter, served = vllm.meter, vllm.processor.get_num_unfinished_requests()
        # What vLLM counts after a step leaves out all that ended with it: all that was scored.
        running = min(served, self._config.slots)
        return EngineStats(
            tokens=TokenCounts(
                generated=self._tokens, drafted=meter.drafted, accepted=meter.accepted
            ),
            steps=meter.steps,
            busy_seconds=meter.busy_seconds,
            running=running,
            waiting=served - running,
            slots=self._config.slots,
            kv_used=meter.kv_used if served else 0.0,
            policy_version=self._version,
        )

    async def close(self) -> None:
        """End vLLM; running requests end with `finish_reason="abort"`. Idempotent."""
        if self._ended is None:
            self._ended = EngineError("the engine is closed")
        for stream in self._streams.values():
            stream.cut()
        await self._free()

    async def _free(self) -> None:
        if self._core is not None:
            await self._core.stop()

    def _end(self, error: EngineError) -> None:
        """The engine is over; everybody who waits is told why."""
        if self._ended is None:
            self._ended = error
        for stream in self._streams.values():
            stream.queue.put(self._ended)

    def _running(self) -> Core:
        if self._ended is not None:
            raise EngineError(str(self._ended)) from self._ended
        if self._core is None:
            raise EngineError("the engine was not started")
        return self._core


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; at the first failure the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
