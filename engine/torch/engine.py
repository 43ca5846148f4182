"""TorchEngine: the asyncio shell around `DecodeCore`.

    decode loop   consumes: requests in the core · produces: token chunks, one queue per request
                  waits for: work, and not being paused · unblocked by: generate, resume
                  bounded by: the core's slots

A step is computed in a thread of its own, so that the event loop keeps running: commands, rewards
and finished samples of a generator do not wait for steps. The core is not thread-safe. Every access
holds a lock (`_between_steps`) that is granted in order of arrival, so that whatever is asked for
during a step is done before the next one.

If the loop fails, every waiting consumer is woken with the reason, and later calls raise it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import torch

from engine.config import EngineConfig
from engine.drafting.source import DraftSource
from engine.errors import EngineError, EngineStartError
from engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk
from engine.torch.core import CoreSettings, DecodeCore
from engine.torch.kernels import warm_up
from engine.torch.model import load_model
from wire.records import EngineStats
from wire.weights.layout import Fingerprint, WeightManifest

Delivery = TokenChunk | EngineError
T = TypeVar("T")


class TorchEngine:
    """The embedded generator; satisfies `engine.protocol.Engine`. One process, one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        source: DraftSource | None,
        max_draft_tokens: int,
        seed: int,
        save: Callable[[], int] = lambda: 0,
        batch_invariant: bool = False,
    ) -> None:
        self._save = save
        self._config = config
        self._model_path = model_path
        self._source = source
        self._max_draft_tokens = max_draft_tokens
        self._seed = seed
        self._batch_invariant = batch_invariant
        self._core: DecodeCore | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._paused = False
        self._queues: dict[str, asyncio.Queue[Delivery]] = {}
        self._lock = asyncio.Lock()
        """Held by every access to the core."""
        self._left: list[str] = []
        """Requests whose reader has left."""
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="torch-decode",
            initializer=_use_threads,
            initargs=(config.threads,),
        )
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
        )
        await asyncio.to_thread(warm_up, drafting=self._source is not None)
        settings = CoreSettings(
            max_step_tokens=config.torch.max_step_tokens,
            max_draft_tokens=self._max_draft_tokens,
            max_prefill_tokens=config.torch.max_prefill_tokens,
            chunk_tokens=config.torch.chunk_tokens,
            top_k=config.top_k_logprobs,
            draft_trees=config.torch.draft_trees,
        )
        self._core = DecodeCore(model, settings, self._source, seed=self._seed)
        self._loop_task = asyncio.create_task(self._decode_loop(self._core), name="torch-decode")
        self._loop_task.add_done_callback(self._loop_ended)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response; closing the iterator frees the slot.

        Raises:
            RequestError: the request cannot be served (at the first chunk asked for).
            EngineError: the engine is not running, or its loop failed.
        """
        name = request.request_id
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        async with self._between_steps() as core:
            core.add(request)
            self._queues[name] = queue
        self._wake.set()
        ended = False
        try:
            while not ended:
                item = await queue.get()
                if isinstance(item, EngineError):
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            del self._queues[name]
            if not ended:
                self._left.append(name)
                if self._core is not None and not self._lock.locked():
                    self._forget_left(self._core)

    async def interrupt(self, request_id: str) -> None:
        """End a request between two steps; its stream reports all tokens drawn, then `abort`."""
        async with self._between_steps() as core:
            self._deliver(core.interrupt(request_id))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens between two steps. Raises RequestError."""
        async with self._between_steps() as core:
            return await self._compute(lambda: core.score(requests))

    async def pause(self) -> None:
        """Stop between two steps and report everything drawn so far. Idempotent."""
        self._running()
        self._paused = True
        async with self._between_steps() as core:
            self._deliver(core.flush())

    async def resume(self) -> None:
        """Continue after `pause`. Idempotent."""
        self._running()
        self._paused = False
        self._wake.set()

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Copy published weights into staging memory, in a thread of its own; steps continue.

        Raises:
            WeightsSupersededError: these were overwritten or removed; nothing is staged.
            WeightsError: the weights do not fit the model or cannot be read; nothing is staged.
        """
        await asyncio.to_thread(self._running().stage_weights, manifest)

    async def install_weights(self, policy_version: int) -> None:
        """Replace the weights between two steps. Raises WeightsError if they are not staged."""
        async with self._between_steps() as core:
            self._deliver(await self._compute(lambda: core.install_weights(policy_version)))

    def fingerprint(self) -> Fingerprint:
        """Of the parameters in use, taken before they drew a token."""
        return self._running().fingerprint

    async def save_cache(self) -> int:
        """Write the snapshot of the cache, if it has a place for one; returns its bytes."""
        async with self._between_steps():
            return await self._compute(self._save)

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the running step."""
        return self._running().stats()

    async def close(self) -> None:
        """End the loop; running requests end with `finish_reason="abort"`. Idempotent."""
        if self._ended is None:
            self._ended = EngineError("the engine is closed")
        async with self._lock:  # waits for a running step
            if self._loop_task is not None and not self._loop_task.done():
                self._loop_task.cancel()
                await asyncio.wait([self._loop_task])
            if self._core is not None:
                self._deliver(self._core.close())
            self._core = None
        self._thread.shutdown()

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[DecodeCore]:
        """The core, while no step is being computed. Raises EngineError when there is none."""
        self._running()
        async with self._lock:
            core = self._running()
            self._forget_left(core)
            yield core

    def _forget_left(self, core: DecodeCore) -> None:
        for name in self._left:
            core.abort(name)
        self._left.clear()

    async def _compute(self, work: Callable[[], T]) -> T:
        """Run in the thread, with the lock held. A cancelled caller still waits for the end."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # the lock is held until the thread is done
            raise

    def _running(self) -> DecodeCore:
        if self._ended is not None:
            raise self._ended
        if self._core is None:
            raise EngineError("the engine is not started: await start() first")
        return self._core

    async def _decode_loop(self, core: DecodeCore) -> None:
        while True:
            while not self._may_step(core):
                self._wake.clear()
                await self._wake.wait()
            async with self._lock:
                self._forget_left(core)
                if self._may_step(core):  # still
                    self._deliver(await self._compute(core.step))

    def _may_step(self, core: DecodeCore) -> bool:
        return core.has_work and not self._paused

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            queue = self._queues.get(chunk.request_id)
            if queue is not None:  # its reader is still there
                queue.put_nowait(chunk)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Wake every consumer when the decode loop failed, so that none waits forever."""
        if task.cancelled():
            return
        failure = task.exception()
        self._ended = EngineError(f"the decode loop failed: {failure!r}")
        self._ended.__cause__ = failure
        for queue in self._queues.values():
            queue.put_nowait(self._ended)


def _use_threads(threads: int | None) -> None:
    """Set OpenMP's number of threads, which each thread has for itself."""
    if threads is not None:
        torch.set_num_threads(threads)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineStartError("engine.device=cuda but torch sees no GPU: use engine.device=auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
