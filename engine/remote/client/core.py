"""The client's view of an engine's core, and its process: watched, called with time limits.

When the process dies, for any reason, `on_end` is called on the event loop with an error that
quotes the end of its log, and every call that waits for it fails at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from asyncrl.engine.errors import EngineError, EngineStartError
from asyncrl.engine.remote.client.responses import Inbox, Responses
from asyncrl.engine.remote.extras import RemoteWorker, RequestExtra, StagingReport
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

_QUOTED_LINES = 15
STATUS_SECONDS = 1.0
"""Longest wait for the exit status of a process that has ended."""


class LogFolder:
    """A private directory `path` with an engine's log, whose `tail` error messages quote."""

    def __init__(self, engine: str, longest: int | None = None) -> None:
        """Make it outside of a TMPDIR in which its path would have more than `longest` bytes."""
        self._engine = engine
        path = tempfile.mkdtemp(prefix=f"asyncrl-{engine}-")
        if longest is not None and len(os.fsencode(path)) > longest:
            Path(path).rmdir()
            path = tempfile.mkdtemp(prefix=f"asyncrl-{engine}-", dir="/tmp")
        self.path = Path(path)
        self.log = self.path / f"{engine}.log"
        self.log.touch()
        self.logging = self.path / "logging.json"

    def configure(self, level: str, terminal: Any, file: Any, loggers: dict[str, Any]) -> None:
        """Write a configuration of `logging`; `terminal` and `file` are parts of handlers."""
        line = f"%(asctime)s %(levelname)s {self._engine}[%(process)d] %(message)s"
        common = {"class": "logging.StreamHandler", "formatter": "line"}
        settings = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": line}},
            "handlers": {
                "terminal": common | {"level": level} | terminal,
                "file": common | {"level": "INFO"} | file,
            },
        }
        self.logging.write_text(json.dumps(settings | loggers))

    def tail(self) -> str:
        """Return the last lines of the log, "" if nothing was written."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-_QUOTED_LINES:])

    def remove(self) -> None:
        """Delete the directory. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


class LateError(EngineError):
    """The process did not answer in time."""


class CoreProcess(ABC):
    """The process of a core: started once, stopped once. Used from one event loop.

    `name` is the engine's in messages ("vLLM"), `call_seconds` the time limit of a call.
    """

    name: str

    def __init__(self, call_seconds: float) -> None:
        self.call_seconds = call_seconds
        self._over = asyncio.Event()
        self._fds: list[int] = []
        self._log: LogFolder | None = None
        self.ended: EngineError | None = None
        """The error that every later call raises; None before the start and while it runs."""
        self.on_end: Callable[[EngineError], None] = lambda _: None
        """Called once, when the process fails; not when it is closed."""

    @abstractmethod
    def _exit_code(self) -> int | None:
        """Return the exit code of the ended process, after a short wait; None if unknown."""

    @abstractmethod
    async def stop(self) -> None:
        """End the process and forget it. Idempotent."""

    def check(self) -> None:
        """Raise EngineError with the reason if the process has ended."""
        if self.ended is not None:
            raise EngineError(str(self.ended)) from self.ended

    async def ask(self, call: Awaitable[T], what: str, *, limit: float | None = None) -> T:
        """Await a call to the process, but not past its end or the time limit in seconds.

        `what` completes the error "vLLM did not {what} within 5 s"; limit None: that of calls.
        Raises EngineError if the call failed or the process ended, LateError if it was slow.
        """
        seconds = self.call_seconds if limit is None else limit
        task, over = asyncio.ensure_future(call), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait([task, over], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if self.ended is not None:
                    raise EngineError(f"{self.name} could not {what}: {self.ended}")
                late = f"{self.name} did not {what} within {seconds:g} s"
                raise LateError(str(self.failure(late)))
            error = task.exception()
            if error is not None:
                raise self.failure(f"{self.name} could not {what}: {error}") from error
            return task.result()
        finally:
            task.cancel()
            over.cancel()

    def failure(self, what: str) -> EngineError:
        """Return an error that quotes the end of the engine's log."""
        tail = "" if self._log is None else self._log.tail()
        return EngineError(f"{what}\nThe end of {self.name}'s log:\n{tail}" if tail else what)

    def start_error(self, model_path: str, error: BaseException, limit: float) -> EngineStartError:
        """Return the error of a start that failed, or took longer than `limit` seconds."""
        failed = f"could not be started with model {model_path!r}"
        if isinstance(error, LateError | TimeoutError):
            failed = (
                f"was not ready after {limit:.0f} s: it was loading or compiling model "
                f"{model_path!r}. Raise launcher.startup_seconds, of which {self.name} gets 90%"
            )
        what = f"{self.name} {failed}: {error}"
        return EngineStartError(what if isinstance(error, EngineError) else str(self.failure(what)))

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all waiters."""
        if self.ended is None:
            self.ended = error
            self._over.set()
            self.on_end(error)

    def close(self) -> None:
        """Refuse every later call; `on_end` is not called. Idempotent."""
        if self.ended is None:
            self.ended = EngineError("the engine is closed")
            self._over.set()

    def _watch(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._fds.append(os.pidfd_open(pid))
            asyncio.get_running_loop().add_reader(self._fds[-1], self._on_exit)

    def _unwatch(self) -> None:
        for fd in self._fds:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    def _on_exit(self) -> None:
        self._unwatch()
        if self.ended is None:
            self.fail(self.failure(f"{self.name} {_how_it_ended(self._exit_code())}"))


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "has died"
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"


T = TypeVar("T")
P = ParamSpec("P")
W = TypeVar("W", bound=RemoteWorker)


class Meter:
    """Counters and gauges of a core since its start; the engine adds what each message reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.busy_seconds = 0.0
        self.kv_used = 0.0
        self.prefix_asked = 0
        """Context tokens of new requests."""
        self.prefix_found = 0
        """Those whose KV was found in the prefix cache."""
        self._busy_since: float | None = None

    def idle(self) -> None:
        """Note that nothing runs (paused, or the last request was aborted)."""
        self._busy_since = None

    def busy(self) -> None:
        """Note that something runs."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def loaded(self, running: int, waiting: int, kv_used: float) -> None:
        """Note the load after the last step of a message, and the time that its steps took."""
        now = time.monotonic()
        if self._busy_since is not None:
            self.busy_seconds += now - self._busy_since
        self.kv_used = kv_used
        self._busy_since = now if running or waiting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """A request to generate, or to score if `extra.scored`."""

    tokens: list[int]
    """The tokens to continue, or whose end to score."""
    max_tokens: int
    """Most tokens to generate; 0: it only scores."""
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]
    extra: RequestExtra
    """The ticket is not set yet."""
    priority: int


class Core(ABC):
    """A running core. Calls raise EngineError when it fails, dies or does not answer in time."""

    min_temperature = 0.01
    """Requests with a lower one are refused: vLLM silently raises it to this, and float32 logits
    overflow in SGLang's division."""
    responses: Responses
    """The responses being generated, to which the core's steps are added."""
    meter: Meter
    vocab_size: int

    def __init__(self, process: CoreProcess) -> None:
        self.process = process
        self._installations = 0
        self.policy_version = 0
        """Version of the loaded weights."""

    @property
    def name(self) -> str:
        """The engine's name in messages: "vLLM"."""
        return self.process.name

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""

    @abstractmethod
    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Send a request that is answered to `inbox`, using prefix KV of these weights only.

        `request_id` was never used before. The inbox is a `Response`, or takes a `Scored`.
        """

    def _salt(self) -> str:
        """Return the salt of these weights: a version may come twice, from two trainers."""
        return f"version {self.policy_version}, installation {self._installations}"

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """End requests and drop their later results; ended ones are ignored."""

    @abstractmethod
    async def interrupt(self, request_id: str) -> None:
        """End a request, which reports all that it has drawn and then its end. Idempotent."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop, and return when all steps have been received; requests keep their state."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume drawing."""

    async def begin_staging(self, manifest: WeightManifest) -> None:
        """Make the worker copy published weights; generation continues."""
        builtins = msgspec.to_builtins(manifest)
        await self._call(None, "stage new weights", RemoteWorker.asyncrl_begin_staging, builtins)

    async def staging(self) -> StagingReport:
        """Return the state of the staging begun last, over all ranks."""
        found = await self._call(None, "stage new weights", RemoteWorker.asyncrl_staging)
        return StagingReport.of_all([msgspec.convert(one, StagingReport) for one in found])

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place and stamp later tokens with them; only while paused.

        Raises after `limit` seconds. Returns as `RemoteWorker.asyncrl_install`.
        """
        install = RemoteWorker.asyncrl_install
        reasons = await self._call(limit, "install new weights", install, policy_version)
        self.policy_version = policy_version
        self._installations += 1
        return next((reason for reason in reasons if reason), "")

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Return the fingerprint of the weights in use, which must not change; steps continue."""
        what = "compare its weights"
        await self._call(None, what, RemoteWorker.asyncrl_begin_fingerprint, shapes)
        while True:
            found, *_ = await self._call(None, what, RemoteWorker.asyncrl_fingerprint)
            if found is not None:  # each rank returns that of the whole model
                return msgspec.convert(found, Fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the rollout cache; return its bytes."""
        return sum(await self._call(None, "save its cache", RemoteWorker.asyncrl_save_cache))

    async def _call(
        self,
        limit: float | None,
        what: str,
        method: Callable[Concatenate[W, P], T],
        *args: P.args,
        **_none: P.kwargs,
    ) -> list[T]:
        """Call a method of the worker; return the results of all ranks, or that of rank 0.

        `limit` is in seconds; None: that of calls.
        """
        return await self._call_by_name(limit, what, method.__name__, list(args))

    @abstractmethod
    async def _call_by_name(
        self, limit: float | None, what: str, method: str, arguments: list[Any]
    ) -> list[Any]:
        """Call as `_call`."""
