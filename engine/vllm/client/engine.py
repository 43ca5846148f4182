"""VllmEngine: vLLM behind the `Engine` protocol, with the cache of rollouts drafting inside it.

    this process (client/)                               vLLM's engine-core process (worker/)
    Generation, Scoring ─► Streams ─► AsyncLLM ────────► scheduler, model, CacheDrafter
    Inbox ◄── StepProcessor ◄───── steps, each stamped ◄─ with the version that drew it
    WeightSwap ── manifest, by rpc ────────────────────► WorkerWeights loads the published file
               ── version, by rpc, while paused ───────► into a twin of the model, and copies that

    output task (AsyncLLM's)   consumes: messages of the core · produces: chunks, by request
                               waits for: the core · unblocked by: its death too
    core watch (CoreProcess)   waits for: the core process to end · then wakes every consumer

The core stamps each token with the version that drew it; weights change only while generation is
paused. Requests that have not begun when the weights change begin again under the new ones, because
their prompt's KV would be of the old version. Prefix KV is shared by requests of one version only
(the version is the salt of its hash); running requests keep theirs.

The parts are `process` (starting, watching, stopping vLLM), `core` (the calls), `streams` (the
requests being served), `responses` (steps become chunks), `generation`, `verification` and
`scoring` (what requests are for), `pausing` and `weights`. What both processes agree on is in
`engine.vllm.remote` and `engine.vllm.extras`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cache.config import CacheConfig
from cache.place import CachePlace
from engine.config import EngineConfig
from engine.errors import EngineError, EngineStartError
from engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk
from engine.requests import Limits, SeedStream
from engine.vllm.client.advice import advice_on_drafting
from engine.vllm.client.core import Core
from engine.vllm.client.generation import Generation
from engine.vllm.client.pausing import Pausing
from engine.vllm.client.process import CoreProcess
from engine.vllm.client.scoring import Scoring
from engine.vllm.client.streams import Streams
from engine.vllm.client.unreported import warm_up
from engine.vllm.client.weights import WeightSwap
from engine.weights import ModelShapes
from wire.records import EngineStats, TokenCounts
from wire.weights.layout import Fingerprint, WeightManifest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a started engine is made of."""

    core: Core
    streams: Streams
    generation: Generation
    scoring: Scoring
    pausing: Pausing
    weights: WeightSwap


class VllmEngine:
    """The generator on vLLM; satisfies `engine.protocol.Engine`. One event loop.

    Args:
        config: of the engine.
        model_path: a directory in HF format or a hub id.
        cache_config: of the cache of rollouts that drafts inside vLLM.
        seed: of the stream that gives seeds to requests without one.
        place: where the cache's snapshot is, and how rollouts are exchanged.
    """

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
        self._process = CoreProcess(config)
        self._starting = False
        self._parts: _Parts | None = None

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineStartError, quoting vLLM's log."""
        process = self._process
        if self._starting or process.ended is not None:
            raise EngineStartError("the engine was started before; make a new one")
        self._starting = True
        try:
            shapes = await asyncio.to_thread(ModelShapes.of_path, self._model_path)
            started = process.start(self._model_path, self._cache_config, self._seed, self._place)
            await asyncio.gather(started, asyncio.to_thread(warm_up))
            self._parts = self._assemble(shapes)
            await self._parts.core.attach(self._config)
        except EngineError as error:
            process.fail(error)
            await process.stop()
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(f"vLLM could not be started: {error}") from error

    def _assemble(self, shapes: ModelShapes) -> _Parts:
        config, vocab_size = self._config, self._process.vllm.vocab_size
        limits = Limits(config.max_model_len, vocab_size, config.top_k_logprobs)
        seeds = SeedStream(self._seed)
        core = Core(self._process)
        streams = Streams(core)
        self._process.on_end = streams.fail
        pausing = Pausing(core, streams)
        return _Parts(
            core=core,
            streams=streams,
            generation=Generation(core, streams, limits, seeds),
            scoring=Scoring(core, streams, limits, seeds),
            pausing=pausing,
            weights=WeightSwap(core, streams, pausing, shapes, config.vllm.call_timeout_seconds),
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response; closing the iterator aborts the request.

        Raises:
            RequestError: the request cannot be served (at the first chunk asked for).
            EngineError: vLLM is not running, or died; the end of its log is quoted.
        """
        async with aclosing(self._running().generation.chunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def interrupt(self, request_id: str) -> None:
        """End a request; its stream reports all finished steps, then `abort`."""
        self._running().generation.interrupt(request_id)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens, all under one policy version.

        They wait for free slots, before all waiting generation. While the engine is paused
        nothing can be scored: vLLM pauses as a whole.

        Raises:
            RequestError: a request cannot be scored; none of them was.
            EngineError: the engine is paused, or vLLM died.
        """
        parts = self._running()
        parts.scoring.check(requests)
        if parts.pausing.paused and requests:
            raise EngineError("the engine is paused: vLLM cannot score now, resume it first")
        return await parts.scoring.score(requests)

    async def pause(self) -> None:
        """Stop drawing tokens and report what was drawn; running requests stay. Idempotent."""
        await self._running().pausing.pause()

    async def resume(self) -> None:
        """Resume drawing after `pause`. Idempotent."""
        await self._running().pausing.resume()

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Have vLLM's worker copy published weights into its staging memory; generation continues.

        Raises:
            WeightsSupersededError: these were overwritten or removed; nothing is staged.
            WeightsError: the weights do not fit the model, cannot be read or have values that are
                not finite; nothing is staged.
            EngineError: vLLM failed.
        """
        await self._running().weights.stage(manifest)

    async def install_weights(self, policy_version: int) -> None:
        """Replace the weights between two steps; running requests continue with the KV they have.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
            EngineError: vLLM failed during the installation; the engine has ended.
        """
        await self._running().weights.install(policy_version)

    async def fingerprint(self) -> Fingerprint:
        """Of the weights that vLLM's layers hold; it generates meanwhile. Raises EngineError."""
        return await self._running().weights.fingerprint()

    async def save_cache(self) -> int:
        """Write the snapshot of the cache, if it has a place for one; returns its bytes."""
        return await self._running().core.save_cache()

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the last step."""
        parts, vllm = self._running(), self._process.vllm
        meter, served = vllm.meter, vllm.processor.get_num_unfinished_requests()
        # vLLM's own count after a step leaves out what ended with it, which is all scored requests.
        running = min(served, self._config.slots)
        return EngineStats(
            tokens=TokenCounts(
                generated=parts.generation.tokens_drawn,
                drafted=meter.drafted,
                accepted=meter.accepted,
            ),
            steps=meter.steps,
            busy_seconds=meter.busy_seconds,
            running=running,
            waiting=served - running,
            slots=self._config.slots,
            kv_used=meter.kv_used if served else 0.0,
            policy_version=parts.core.policy_version,
        )

    async def close(self) -> None:
        """End vLLM; running requests end with `finish_reason="abort"`. Idempotent."""
        self._advise()
        self._process.close()
        if self._parts is not None:
            self._parts.streams.cut()
        await self._process.stop()

    def _advise(self) -> None:
        """Log that the drafter did not pay, where it costs vLLM its asynchronous scheduling."""
        if self._parts is None or self._process.ended is not None:
            return
        vllm_config = self._process.vllm.llm.vllm_config
        if vllm_config.speculative_config is None or vllm_config.device_config.device_type == "cpu":
            return
        advice = advice_on_drafting(self.stats())
        if advice:
            _LOG.warning(advice)

    def _running(self) -> _Parts:
        """The parts. Raises EngineError when the engine was not started or has ended."""
        if self._parts is None and self._process.ended is None:
            raise EngineError("the engine was not started")
        self._process.check()
        assert self._parts is not None  # noqa: S101 - for the type checker
        return self._parts
