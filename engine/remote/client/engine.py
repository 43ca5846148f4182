"""RemoteEngine: the `Engine` protocol for engines whose model runs in a separate process.

    this process (client/)                        the core's process (worker/)
    Generation, Scoring ─► Streams ─► Core ─────► scheduler, model, drafter
    Responses ◄──────────── the engine's output ◄─ steps, each stamped with the version that drew it
    WeightSwap ── manifest, by a call ──────────► loads the published file into a twin of the model
               ── version, while paused ────────► and copies that

    output task (the engine's)  consumes: messages of the core · produces: chunks, by request
                                waits for: the core · unblocked by: its death too
    core watch (CoreProcess)    waits for: the core process to end · then wakes every consumer

The core stamps each token with the version that drew it; weights change only while generation is
paused. Requests that have not begun when the weights change begin again under the new ones, because
their prompt's KV would be of the old version. Prefix KV is shared by requests of one version only
(the version is the salt of its hash); running requests keep theirs.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import (
    EngineError,
    EngineStartError,
    WeightsError,
    WeightsSupersededError,
)
from asyncrl.engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk
from asyncrl.engine.remote.client.core import Core, CoreProcess
from asyncrl.engine.remote.client.generation import (
    Generation,
    check_temperature,
    score_of,
    scoring,
    unscored,
)
from asyncrl.engine.remote.client.streams import Reader, Streams
from asyncrl.engine.remote.client.unreported import warm_up
from asyncrl.engine.requests import Limits, SeedStream
from asyncrl.engine.weights import ModelShapes, longest_installation, not_staged
from asyncrl.wire.records.step import EngineStats, TokenCounts
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


class Pausing:
    """Stops and resumes drawing, one change at a time."""

    def __init__(self, core: Core, streams: Streams) -> None:
        self._core = core
        self._streams = streams
        self._lock = asyncio.Lock()
        self.paused = False

    async def pause(self) -> None:
        """Stop drawing and report what was drawn; running requests stay. Idempotent."""
        async with self._lock:
            if not self.paused:
                await self._stop()
                self.paused = True

    async def resume(self) -> None:
        """Resume drawing after `pause`. Idempotent."""
        async with self._lock:
            if self.paused:
                await self._resume()
                self.paused = False

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Stop drawing inside the block. After an exception drawing is not resumed."""
        async with self._lock:
            if not self.paused:
                await self._stop()
            yield
            if not self.paused:
                await self._resume()

    async def _stop(self) -> None:
        await self._core.pause()
        self._core.responses.flush()

    async def _resume(self) -> None:
        await self._core.resume()
        if len(self._streams):
            self._core.meter.busy()


_LOG = logging.getLogger(__name__)
_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.002, 0.05
"""Interval between polls for staged weights. Each is answered between two steps."""


@dataclass
class WeightSwap:
    """Stages published weights in the worker while it generates, then installs them."""

    _core: Core
    _streams: Streams
    _pausing: Pausing
    _shapes: ModelShapes
    _longest: Callable[[int], float]
    """Returns the time limit, in seconds, for staging or installing this many bytes."""

    def __post_init__(self) -> None:
        self._limit = 0.0
        self._lock = asyncio.Lock()
        self._staged: int | None = None
        self._fingerprint: Fingerprint | None = None
        self._said_why = False

    async def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the weights in use, which do not change. Raises EngineError."""
        async with self._lock:
            if self._fingerprint is None:
                self._fingerprint = await self._core.fingerprint(self._shapes.shapes)
            return self._fingerprint

    async def stage(self, manifest: WeightManifest) -> None:
        """Copy published weights into the worker's staging memory.

        Raises as `Engine.stage_weights`; EngineError if the core failed, or did not finish in time.
        """
        async with self._lock:
            self._staged = None
            self._shapes.check(manifest)
            # An adapter is merged into all weights, which are loaded in at least 16 bits.
            nbytes = max(manifest.nbytes, 2 * self._shapes.elements)
            self._limit = self._longest(nbytes)
            await self._core.begin_staging(manifest)
            await self._staging_ended()
            self._staged = manifest.policy_version

    async def _staging_ended(self) -> None:
        """Poll, because a call that waited for the copy would hold up the core's steps."""
        deadline = time.monotonic() + self._limit
        pause = _FIRST_POLL_SECONDS
        while (report := await self._core.staging()).state == "running":
            if time.monotonic() > deadline:
                raise self._core.process.failure(
                    f"{self._core.name} did not stage new weights within {self._limit:g} s"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        if report.state == "superseded":
            raise WeightsSupersededError(report.message)
        if report.state == "refused":
            raise WeightsError(report.message)

    async def install(self, policy_version: int) -> None:
        """Replace the weights between two steps.

        Raises WeightsError if this version is not staged; EngineError if the core failed during the
        installation: the engine has ended.
        """
        async with self._lock:
            if self._staged != policy_version:
                raise not_staged(policy_version, self._staged)
            try:
                async with self._pausing.stopped():
                    self._fingerprint = None
                    began = time.monotonic()
                    why_reloaded = await self._core.install(policy_version, self._limit)
                    seconds = time.monotonic() - began
                    self._staged = None
                    await self._streams.restart_unstarted()
            except EngineError as error:
                self._core.process.fail(error)
                raise
            if why_reloaded and not self._said_why:
                self._said_why = True
                _LOG.warning(
                    "%s loads new weights while it is paused, %.1f s for each version; copying "
                    "staged ones would be several times faster, but cannot be used: %s",
                    self._core.name,
                    seconds,
                    why_reloaded,
                )


T = TypeVar("T")


class Scoring:
    """The `score` calls of one engine."""

    def __init__(self, core: Core, streams: Streams, limits: Limits, seeds: SeedStream) -> None:
        self._core = core
        self._streams = streams
        self._limits = limits
        self._seeds = seeds

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Raise RequestError if one of them cannot be scored."""
        for request in requests:
            self._limits.check_score(request)
            check_temperature(request.request_id, request.sampling, self._core)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return scores in the order asked; rescore those that new weights overtook."""
        scores = await _gather([self._score(request) for request in requests])
        while len({score.policy_version for score in scores}) > 1:
            installed = self._core.policy_version  # not the highest: it may have fallen
            stale = [i for i, score in enumerate(scores) if score.policy_version != installed]
            again = await _gather([self._score(requests[i]) for i in stale])
            for i, score in zip(stale, again, strict=True):
                scores[i] = score
        return scores

    async def _score(self, request: ScoreRequest) -> Score:
        if not len(request.tokens):
            return unscored(request, self._core.policy_version)
        name = request.request_id
        submitted = scoring(request, self._seeds.seed_of(request.sampling))
        scored = await self._streams.scored(name, submitted, Reader())
        if scored is None:
            raise EngineError(f"request {name!r}: the engine was closed while scoring")
        return score_of(request, scored)


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Gather results in order; at the first failure the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class _Parts:
    def __init__(self, core: Core, config: EngineConfig, shapes: ModelShapes, seed: int) -> None:
        limits = Limits(config.max_model_len, core.vocab_size, config.top_k_logprobs)
        seeds = SeedStream(seed)
        self.core = core
        self.streams = Streams(core)
        self.generation = Generation(core, self.streams, limits, seeds)
        self.scoring = Scoring(core, self.streams, limits, seeds)
        self.pausing = Pausing(core, self.streams)
        longest = partial(longest_installation, at_least=core.process.call_seconds)
        self.weights = WeightSwap(core, self.streams, self.pausing, shapes, longest)


class RemoteEngine(ABC):
    """An `asyncrl.engine.protocol.Engine` whose model runs in another process. One event loop.

    `seed` is that of the stream that gives seeds to requests without one.
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
        self._seed = seed
        self._place = place or CachePlace()
        self._process = self._new_process()
        self._starting = False
        self._parts: _Parts | None = None

    @abstractmethod
    def _new_process(self) -> CoreProcess:
        """Make the process, which is not started yet."""

    @abstractmethod
    async def _start_core(self) -> Core:
        """Start the process with policy version 0 and connect to it, or raise EngineError."""

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineStartError, quoting the engine's log."""
        process = self._process
        if self._starting or process.ended is not None:
            raise EngineStartError("this engine was already started; create a new one")
        self._starting = True
        try:
            shapes = await asyncio.to_thread(ModelShapes.of_path, self._model_path)
            core, _ = await asyncio.gather(self._start_core(), asyncio.to_thread(warm_up))
            self._parts = _Parts(core, self._config, shapes, self._seed)
            process.on_end = self._parts.streams.fail
        except EngineError as error:
            process.fail(error)
            await process.stop()
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(f"{process.name} could not be started: {error}") from error

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response; closing the iterator aborts the request.

        Raises RequestError at the first chunk if the request cannot be served; EngineError, which
        quotes the end of the log, if the core is not running or died.
        """
        async with aclosing(self._running().generation.chunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def interrupt(self, request_id: str) -> None:
        """End a request; its stream reports all finished steps, then `abort`."""
        self._running().generation.interrupt(request_id)

    def end_session(self, session: str) -> None:  # noqa: B027
        """Do nothing: prefix caches are not tied to sessions and evict by last use."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens, all under one policy version, before all waiting generation.

        Raises RequestError if a request cannot be scored (none of them was); EngineError if the
        core died, or the engine is paused: the core pauses as a whole.
        """
        parts = self._running()
        parts.scoring.check(requests)
        if parts.pausing.paused and requests:
            raise EngineError(
                f"the engine is paused: {parts.core.name} cannot score now, resume it first"
            )
        return await parts.scoring.score(requests)

    async def pause(self) -> None:
        """Stop drawing tokens and report what was drawn; running requests stay. Idempotent."""
        await self._running().pausing.pause()

    async def resume(self) -> None:
        """Resume drawing after `pause`. Idempotent."""
        await self._running().pausing.resume()

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Stage published weights while generation continues. Raises as `WeightSwap.stage`."""
        await self._running().weights.stage(manifest)

    async def install_weights(self, policy_version: int) -> None:
        """Replace the weights between two steps. Raises as `WeightSwap.install`."""
        await self._running().weights.install(policy_version)

    async def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the weights in use. Raises EngineError."""
        return await self._running().weights.fingerprint()

    async def save_cache(self) -> int:
        """Write the snapshot of the cache, if it has a path for one; return its bytes."""
        return await self._running().core.save_cache()

    def stats(self) -> EngineStats:
        """Return counters and gauges as of the last step."""
        parts = self._running()
        meter, served = parts.core.meter, parts.core.unfinished
        # A core's count after a step leaves out what ended with it, as all scored requests do.
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
        """End the core; running requests end with `finish_reason="abort"`. Idempotent."""
        self._process.close()
        if self._parts is not None:
            self._parts.streams.cut()
        await self._process.stop()

    def _running(self) -> _Parts:
        """Return the parts, or raise EngineError if the engine was not started or has ended."""
        if self._parts is None and self._process.ended is None:
            raise EngineError("the engine was not started")
        self._process.check()
        assert self._parts is not None  # noqa: S101 - for the type checker
        return self._parts
