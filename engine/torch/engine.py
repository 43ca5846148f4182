"""TorchEngine: the asyncio shell around `DecodeCore`.

    decode loop   consumes: requests in the core · produces: token chunks, one queue per request
                  waits for: work, and not being paused · unblocked by: generate, resume
                  bounded by: the core's slots
If the loop dies, every waiting consumer is woken with the reason, and later calls raise it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import torch

from engine.config import EngineConfig
from engine.errors import EngineError, EngineStartError
from engine.protocol import EngineStats, GenerateRequest, Score, ScoreRequest, TokenChunk
from engine.torch.core import CoreSettings, DecodeCore
from engine.torch.drafting import DraftSource
from engine.torch.kernels import warm_up
from engine.torch.model import load_model

Delivery = TokenChunk | EngineError

_QUIET_TURNS = 16
"""Turns of the event loop without a new request after which the next step begins; 2 us each."""
_MOST_TURNS = 512


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
    ) -> None:
        self._save = save
        self._config = config
        self._model_path = model_path
        self._source = source
        self._max_draft_tokens = max_draft_tokens
        self._seed = seed
        self._core: DecodeCore | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._paused = False
        self._queues: dict[str, asyncio.Queue[Delivery]] = {}
        self._ended: EngineError | None = None

    async def start(self) -> None:
        """Load the model, check it, start the decode loop. Raises EngineStartError."""
        if self._core is not None or self._ended is not None:
            raise EngineStartError("the engine was started before; make a new one")
        config = self._config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = _device(config)
        dtype = _dtype(config, device)
        model = await asyncio.to_thread(
            load_model,
            self._model_path,
            slots=config.slots,
            max_len=config.max_model_len,
            device=device,
            dtype=dtype,
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
        core = self._running()
        core.add(request)
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._wake.set()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            del self._queues[request.request_id]
            core.abort(request.request_id)

    async def interrupt(self, request_id: str) -> None:
        """End a request between two steps; its stream reports all that was drawn, then `abort`."""
        self._deliver(self._running().interrupt(request_id))

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens between two steps. Raises RequestError."""
        return self._running().score(requests)

    async def pause(self) -> None:
        """Stop between two steps and report everything drawn so far. Idempotent."""
        core = self._running()
        self._paused = True
        self._deliver(core.flush())

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        self._running()
        self._paused = False
        self._wake.set()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Swap weights between two steps. Raises WeightsError, and then nothing was changed."""
        self._deliver(self._running().update_weights(weights, policy_version))

    async def save_cache(self) -> int:
        """Write the snapshot of the cache, if it has a place for one; returns its bytes."""
        self._running()
        return self._save()

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        return self._running().stats()

    async def close(self) -> None:
        """End the loop; running requests end with `finish_reason="abort"`. Idempotent."""
        if self._ended is None:
            self._ended = EngineError("the engine is closed")
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        if self._core is not None:
            self._deliver(self._core.close())
        self._core = None

    def _running(self) -> DecodeCore:
        if self._ended is not None:
            raise self._ended
        if self._core is None:
            raise EngineError("the engine is not started: await start() first")
        return self._core

    async def _decode_loop(self, core: DecodeCore) -> None:
        while True:
            while self._paused or not core.has_work:
                self._wake.clear()
                await self._wake.wait()
            self._deliver(core.step())
            await _let_others_move(core)

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self._queues[chunk.request_id].put_nowait(chunk)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Wake every consumer when the decode loop failed, so that none waits for ever."""
        if task.cancelled():
            return
        failure = task.exception()
        self._ended = EngineError(f"the decode loop failed: {failure!r}")
        self._ended.__cause__ = failure
        for queue in self._queues.values():
            queue.put_nowait(self._ended)


async def _let_others_move(core: DecodeCore) -> None:
    """Give the loop turns until nobody has moved for some of them.

    An order takes several turns from its socket to the core, and so does a chunk on its way out.
    With one turn a step, new requests trickle in and slots stay empty.
    """
    quiet = 0
    for _ in range(_MOST_TURNS):
        before = core.requests_seen
        await asyncio.sleep(0)
        quiet = 0 if core.requests_seen != before else quiet + 1
        if quiet >= _QUIET_TURNS:
            return


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineStartError("engine.device=cuda but torch sees no GPU: use engine.device=auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if config.dtype == "float32" else torch.bfloat16
