"""TorchEngine: the asyncio shell around `DecodeCore`, and the thread that computes its steps.

    decode thread  consumes: requests in the core · produces: token chunks, one queue per request
                   waits for: work, and not being paused · unblocked by: generate, resume
                   bounded by: the core's slots

Chunks of a step are delivered while the next one is computed. The core is not thread-safe, so only
the thread touches it; calls during a step are made before the next one, in order. If a step fails,
every waiting consumer is woken with the reason, and later calls raise it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import load_model
from asyncrl.engine.torch.step_kernels import warm_up
from asyncrl.wire.records.step import EngineStats
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A call between two steps, and the callbacks of its end in the event loop."""

    work: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]
    is_last: bool = False
    """The thread ends after it. It is done even if a step has failed."""


class DecodeThread:
    """Runs jobs and steps of one core. Made and called in one event loop.

    `prepare`, `may_step` and `step` are called in the thread; `deliver` gets a step's chunks in the
    event loop, and `failed` its exception. Then no other step follows, and jobs fail.
    """

    def __init__(
        self,
        step: Callable[[], list[TokenChunk]],
        *,
        may_step: Callable[[], bool],
        deliver: Callable[[list[TokenChunk]], None],
        failed: Callable[[Exception], None],
        prepare: Callable[[], None],
    ) -> None:
        self._step, self._may_step, self._prepare = step, may_step, prepare
        self._deliver, self._failed = deliver, failed
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="torch-decode", daemon=True)
        self._thread.start()

    def post(
        self,
        work: Callable[[], T],
        *,
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call `work` in the thread between two steps, without waiting for it.

        `done` gets its result in the event loop, before reports of later steps; `failed` its error.
        """
        self._add(_Job(work, done, failed))

    async def run(
        self,
        work: Callable[[], T],
        *,
        done: Callable[[T], None] | None = None,
        is_last: bool = False,
    ) -> T:
        """Call `work` between two steps and return its result. If cancelled, it is still called.

        `done` is as in `post`: reports of later steps may come before the caller resumes. If
        `is_last`, the thread ends after it.
        """
        result: asyncio.Future[T] = self._loop.create_future()

        def resolve(value: T) -> None:
            if done is not None:
                done(value)
            if not result.done():
                result.set_result(value)

        def failed(error: Exception) -> None:
            if not result.done():
                result.set_exception(error)

        self._add(_Job(work, resolve, failed, is_last))
        return await result

    def wake(self) -> None:
        """Check again for something to compute."""
        self._wake.set()

    async def close(self, last: Callable[[], list[TokenChunk]]) -> None:
        """End the thread after the running step and earlier jobs.

        `last` is called at the end, also after a failed step. Its chunks are delivered.
        """
        try:
            await self.run(last, done=self._deliver, is_last=True)
        finally:
            await asyncio.to_thread(self._thread.join)

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._wake.set()

    def _serve(self) -> None:
        self._prepare()
        while True:
            self._wake.clear()  # before looking: later calls set it again
            if self._do_jobs():
                return
            if self._failure is None and self._may_step():
                try:
                    chunks = self._step()
                except Exception as error:
                    logger.exception("the decode loop failed")
                    self._failure = error
                    self._tell(self._failed, error)
                else:
                    if chunks:
                        self._tell(self._deliver, chunks)
            elif not self._jobs:
                self._wake.wait()

    def _do_jobs(self) -> bool:
        """Run the queued jobs; return True after the very last job."""
        outcomes: list[tuple[Callable[[Any], None], Any]] = []
        ends = False
        while self._jobs and not ends:
            job = self._jobs.popleft()
            ends = job.is_last
            try:
                if self._failure is not None and not ends:
                    raise EngineError(f"the decode loop failed: {self._failure!r}")
                outcomes.append((job.done, job.work()))
            except Exception as error:  # noqa: BLE001 - its caller gets it
                outcomes.append((job.failed, error))
        if outcomes:
            self._tell(_tell_all, outcomes)
        return ends

    def _tell(self, function: Callable[[Any], None], what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, what)
        except RuntimeError:  # the event loop has ended without `close`
            self._failure = self._failure or EngineError("the event loop has ended")


def _tell_all(outcomes: list[tuple[Callable[[Any], None], Any]]) -> None:
    for function, what in outcomes:
        function(what)


@dataclass(slots=True)
class _Reader:
    """The consumer of one request's stream."""

    deliveries: asyncio.Queue[TokenChunk | Exception] = field(default_factory=asyncio.Queue)
    has_left: bool = False
    is_served: bool = False
    """True if the core has the request. Only the decode thread reads it."""


class TorchEngine:
    """The embedded generator, an `asyncrl.engine.protocol.Engine`. One process, one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        source: RolloutCache | None,
        max_draft_tokens: int,
        seed: int,
        save: Callable[[], int] = lambda: 0,
        batch_invariant: bool = False,
    ) -> None:
        self._config, self._model_path = config, model_path
        self._source, self._save = source, save
        self._max_draft_tokens, self._seed = max_draft_tokens, seed
        self._batch_invariant = batch_invariant
        self._core: DecodeCore | None = None
        self._thread: DecodeThread | None = None
        self._paused = False
        self._readers: dict[str, _Reader] = {}
        self._ended: EngineError | None = None

    async def start(self) -> None:
        """Load the model, check it, start the decode loop. Raises EngineStartError."""
        if self._core is not None or self._ended is not None:
            raise EngineStartError("the engine was started before; make a new one")
        config = self._config
        _use_threads(config.threads)
        device = _device(config)
        dtype: torch.dtype = getattr(torch, config.weights_dtype(on_cpu=device.type == "cpu"))
        model = await asyncio.to_thread(
            load_model,
            self._model_path,
            slots=config.slots,
            max_len=config.max_model_len,
            device=device,
            dtype=dtype,
            batch_invariant=self._batch_invariant,
            fused=config.torch.fused,
            wide_logits=config.has_float32_logits(on_cpu=device.type == "cpu"),
        )
        settings = CoreSettings(
            max_step_tokens=config.torch.max_step_tokens,
            max_draft_tokens=self._max_draft_tokens,
            max_prefill_tokens=config.torch.max_prefill_tokens,
            chunk_tokens=config.torch.chunk_tokens,
            top_k=config.top_k_logprobs,
            draft_trees=config.torch.draft_trees,
            logits_bytes=config.logits_bytes,
            weight_staging=config.weight_staging,
        )
        drafting = self._max_draft_tokens > 0
        await asyncio.to_thread(warm_up, model, listed=settings.listed, drafting=drafting)
        core = self._core = DecodeCore(model, settings, self._source, seed=self._seed)
        self._thread = DecodeThread(
            lambda: core.step(),
            may_step=lambda: core.has_work and not self._paused,
            deliver=self._deliver,
            failed=self._step_failed,
            prepare=partial(_use_threads, config.threads),
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response; closing the iterator frees the slot.

        Raises RequestError at the first chunk, EngineError if the engine is not running or failed.
        """
        core, thread = self._running()
        name, reader = request.request_id, _Reader()

        def add() -> None:
            core.add(request)
            reader.is_served = True

        def abort() -> None:
            if reader.is_served:  # else it was refused because its id was in use
                core.abort(name)

        def begin(_: None) -> None:
            if not reader.has_left:  # an earlier request may have had the same id
                self._readers[name] = reader

        thread.post(add, done=begin, failed=reader.deliveries.put_nowait)
        ended = False
        try:
            while not ended:
                item = await reader.deliveries.get()
                ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            reader.has_left = True
            if self._readers.get(name) is reader:
                del self._readers[name]
            if not ended and self._ended is None:
                thread.post(abort, done=lambda _: None, failed=self._step_failed)

    def interrupt(self, request_id: str) -> None:
        """End a request before the next step; its stream reports all tokens drawn, then `abort`."""
        core, thread = self._running()
        thread.post(
            partial(core.interrupt, request_id), done=self._deliver, failed=self._step_failed
        )

    def end_session(self, session: str) -> None:
        """Free the KV of a response whose turns are over, before the next step."""
        if self._core is not None and self._thread is not None and self._ended is None:
            end = partial(self._core.end_session, session)
            self._thread.post(end, done=lambda _: None, failed=self._step_failed)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens between two steps. Raises RequestError."""
        core, thread = self._running()
        return await thread.run(lambda: core.score(requests))

    async def pause(self) -> None:
        """Stop between two steps and report everything drawn so far. Idempotent."""
        core, thread = self._running()
        self._paused = True
        await thread.run(core.flush, done=self._deliver)

    async def resume(self) -> None:
        """Continue after `pause`. Idempotent."""
        _, thread = self._running()
        self._paused = False
        thread.wake()

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Stage published weights in a separate thread. Raises as `StagedWeights.stage`."""
        core, _ = self._running()
        await asyncio.to_thread(core.stage_weights, manifest)

    async def install_weights(self, policy_version: int) -> None:
        """Replace the weights between two steps. Raises WeightsError if they are not staged."""
        core, thread = self._running()
        # Tokens drawn under the old weights must come before those of the next steps.
        await thread.run(lambda: core.install_weights(policy_version), done=self._deliver)

    async def fingerprint(self) -> Fingerprint:
        """Compute the fingerprint of the parameters in use in a separate thread; steps continue."""
        core, _ = self._running()
        return await asyncio.to_thread(lambda: core.fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the cache, if it has a path for one; return its bytes."""
        _, thread = self._running()
        return await thread.run(self._save)

    def stats(self) -> EngineStats:
        """Return counters and gauges, as of the running step."""
        return self._running()[0].stats()

    async def close(self) -> None:
        """End the loop; running requests end with `finish_reason="abort"`. Idempotent."""
        if self._ended is None:
            self._ended = EngineError("the engine is closed")
        core, thread = self._core, self._thread
        if core is not None and thread is not None:
            self._core = self._thread = None
            await thread.close(core.close)

    def _running(self) -> tuple[DecodeCore, DecodeThread]:
        if self._ended is not None:
            raise self._ended
        if self._core is None or self._thread is None:
            raise EngineError("the engine is not started: await start() first")
        return self._core, self._thread

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            reader = self._readers.get(chunk.request_id)
            if reader is not None:  # it is still there
                reader.deliveries.put_nowait(chunk)

    def _step_failed(self, failure: Exception) -> None:
        """Wake every reader, so that none waits forever."""
        if self._ended is not None:
            return
        self._ended = EngineError(f"the decode loop failed: {failure!r}")
        self._ended.__cause__ = failure
        for reader in self._readers.values():
            reader.deliveries.put_nowait(self._ended)


def _use_threads(threads: int | None) -> None:
    """Set OpenMP's number of threads, which is a setting of each thread."""
    if threads is not None:
        torch.set_num_threads(threads)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineStartError("engine.device=cuda but torch sees no GPU: use engine.device=auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
