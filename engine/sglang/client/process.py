"""SGLang's processes and sockets: started, watched, waited for within limits, stopped.

receiving task   consumes: `ToClient` messages · produces: calls of `take`
                 waits for: the scheduler process · unblocked by: `close`
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.remote.client.core import STATUS_SECONDS, CoreProcess, LogFolder
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.engine.sglang.messages import ToClient, ToWorker
from asyncrl.engine.sglang.worker.plugin import MARK_VARIABLE

_LONGEST_FOLDER = 80
"""Bytes. A socket's path may have 107."""
_PACKAGES = Path(str(files("asyncrl"))).resolve().parent


class SglangFolder(LogFolder):
    """A private directory with SGLang's log and the sockets to it."""

    def __init__(self, level: str) -> None:
        super().__init__("sglang", _LONGEST_FOLDER)
        self.requests = f"ipc://{self.path / 'requests'}"
        self.outputs = f"ipc://{self.path / 'outputs'}"
        # Its stderr is the log file, its stdout the generator's stderr.
        terminal, file = {"stream": "ext://sys.stdout"}, {"stream": "ext://sys.stderr"}
        root = {"handlers": ["terminal", "file"], "level": "INFO"}
        self.configure(level, terminal, file, {"root": root})


def environment_of(config: EngineConfig, folder: SglangFolder) -> dict[str, str]:
    """Return the environment variables of SGLang's processes."""
    threads = str(config.rank_threads)
    variables = os.environ | {
        MARK_VARIABLE: "1",
        "SGLANG_LOGGING_CONFIG_PATH": str(folder.logging),
        # SGLang's own sockets, which nothing else uses, take msgpack (sglang 0.5.23, environ.py).
        "SGLANG_USE_PICKLE_IPC": "0",
        # Room for drafts beyond max_model_len, which no request may use.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    # Threads that spin at barriers starve each other when cores are shared with a trainer.
    variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    variables.pop("PYTHONHOME", None)
    if Path(sysconfig.get_path("purelib")).resolve() != _PACKAGES:
        # A source tree: SGLang's interpreter takes our modules from it too. Installed packages are
        # not shared, because what lies next to them is not for that interpreter.
        before = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
        variables["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), *before])
    return variables


logger = logging.getLogger(__name__)


class Link:
    """Sends `ToWorker` messages and passes on `ToClient` messages in order.

    Its sockets are in the private `folder`. `fail` gets the error when receiving has failed.
    """

    def __init__(
        self,
        folder: SglangFolder,
        take: Callable[[ToClient], None],
        fail: Callable[[EngineError], None],
    ) -> None:
        self._take = take
        self._fail = fail
        self._context = zmq.asyncio.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._push, self._pull = plain.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        ends: list[tuple[zmq.Socket[Any], str]]
        ends = [(self._push, folder.requests), (self._pull, folder.outputs)]
        for socket, address in ends:
            socket.set_hwm(0)  # nothing is dropped or held up: senders bound requests
            socket.linger = 0
            socket.bind(address)
        self._task = asyncio.create_task(self._receive(), name="asyncrl-sglang-outputs")

    def send(self, message: ToWorker) -> None:
        """Queue a message, without yielding to other tasks, which could change the order.

        Raises EngineError if the worker has not connected yet, or is gone.
        """
        try:
            self._push.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineError("SGLang's scheduler process is not connected") from error

    async def _receive(self) -> None:
        try:
            while True:
                frame = await self._pull.recv()
                self._take(self._decoder.decode(frame))
        except (msgspec.MsgspecError, ValueError) as error:
            self._fail(
                EngineError(
                    f"SGLang's process sent a message that cannot be read ({error}): is asyncrl "
                    "the same version in engine.sglang.python?"
                )
            )
        except EngineError as error:
            self._fail(error)
        except Exception as error:  # readers must not wait for a task that is gone
            logger.exception("processing a message of SGLang's process failed")
            self._fail(EngineError(f"processing a message of SGLang's process failed: {error!r}"))

    async def close(self) -> None:
        """Stop receiving and close both sockets."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._push.close()
        self._pull.close()
        self._context.term()


MODULE = "asyncrl.engine.sglang.worker.main"
_STOP_SECONDS = 10.0
"""Longest wait for the end; then the processes are killed."""


class SglangProcess(CoreProcess):
    """One SGLang: `open` and `start` once, `stop` once. Used from one event loop."""

    name = "SGLang"

    def __init__(self, config: SglangConfig) -> None:
        super().__init__(config.call_seconds)
        self._config = config
        self._folder: SglangFolder | None = None
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, take: Callable[[ToClient], None]) -> SglangFolder:
        """Make its folder, and pass each message that it sends to `take`."""
        self._folder = self._log = folder = SglangFolder(self._config.log_level)
        self._link = Link(folder, take, self._on_broken_link)
        return folder

    def send(self, message: ToWorker) -> None:
        """Queue a message for its scheduler process. Raises EngineError if nothing runs."""
        self.check()
        if self._link is None:
            raise EngineError("SGLang is not running")
        self._link.send(message)

    def _on_broken_link(self, error: EngineError) -> None:
        """End the process, whose messages cannot be read any more."""
        self.fail(self.failure(str(error)))
        if self._process is not None:
            self._process.terminate()

    def start(self, python: str, environment: dict[str, str], settings: msgspec.Struct) -> None:
        """Start `python -m MODULE` in a new session, with `settings` on its command line.

        Its stderr goes to the log, its stdout to this stderr. Raises EngineStartError.
        """
        assert self._folder is not None  # noqa: S101 - `open` comes first
        arguments = [msgspec.json.encode(settings).decode(), str(os.getpid())]
        try:
            with self._folder.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [python, "-P", "-m", MODULE, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=_stderr(),
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineStartError(
                f"engine.sglang.python: {python} cannot be run: {error}"
            ) from error
        self._watch([self._process.pid])

    def _exit_code(self) -> int | None:
        assert self._process is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(STATUS_SECONDS)
        return None

    async def stop(self) -> None:
        """End all of its processes and remove its folder. Idempotent."""
        self._unwatch()
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)
        if self._folder is not None:
            self._folder.remove()


def _stderr() -> int:
    """Return this process's stderr, which a test may have replaced by an object without a file."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return subprocess.DEVNULL


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, which ends its schedulers; then kill what is left of its session."""
    deadline = time.monotonic() + _STOP_SECONDS
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(deadline - time.monotonic())
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
