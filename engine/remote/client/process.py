"""The process of an engine's core, as the generator sees it: watched, and called with time limits.

When it dies, for any reason, `on_end` is called on the event loop with an error that quotes the end
of its log, and every call that waits for it fails at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.engine.errors import EngineError, EngineStartError

T = TypeVar("T")

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
