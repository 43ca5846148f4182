"""Threads that run the user's code in a worker, and those among them that nobody can end.

A thread cannot be ended from outside. One whose caller has given up is *left behind*: it is counted
until its code returns, and the pool replaces a process with too many (`lane`). All are daemons, so
they do not keep the process. Import-light: worker processes load this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class LeftBehind:
    """The threads of a process that were left behind, until they end."""

    def __init__(self) -> None:
        self._since: dict[threading.Thread, float] = {}

    def add(self, thread: threading.Thread, *, waited: bool) -> None:
        """Count a thread from now on.

        Args:
            thread: of the user's code.
            waited: it has had its time already; otherwise it has the patience of `count`.
        """
        self._since[thread] = -float("inf") if waited else time.monotonic()

    def count(self, patience: float) -> int:
        """How many still run, of those that were left behind so many seconds ago."""
        self._since = {one: since for one, since in self._since.items() if one.is_alive()}
        latest = time.monotonic() - patience
        return sum(since <= latest for since in self._since.values())


LEFT_BEHIND = LeftBehind()
"""Of this process."""


class SessionThread:
    """Runs a session's calls one after the other, always in the same thread."""

    def __init__(self, name: str = "asyncrl-environment") -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False
        """Whether it is in the user's code."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a method; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.busy = True
        self._calls.put((method, args, loop, future))
        return await future

    def end(self, *, waited: bool = True) -> None:
        """Let the thread end after its call; it is left behind if it is in one."""
        self._calls.put(None)
        if self.busy:
            LEFT_BEHIND.add(self._thread, waited=waited)

    def _serve(self) -> None:
        process = os.getpid()
        while (call := self._calls.get()) is not None:
            method, args, loop, future = call
            result, error = None, None
            try:
                result = method(*args)
            except BaseException as raised:  # noqa: BLE001 - handed to the caller
                error = raised
            if os.getpid() != process:
                os._exit(0)  # a fork of this process that the method has returned from
            self.busy = False
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(_settle, future, result, error)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run this in a thread of its own: an agent that blocks holds up nobody else.

    If the caller is cancelled, the thread is left behind.
    """

    def run() -> Any:
        try:
            return work()
        except Exception:
            raise
        except BaseException as raised:  # would end the loop if it were a task's
            raise RuntimeError(f"it raised {type(raised).__name__}: {raised}") from raised

    thread = SessionThread("asyncrl-agent")
    try:
        return await thread.run(run, ())
    finally:
        thread.end(waited=False)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # it was given up
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        future.set_exception(RuntimeError(f"it raised StopIteration: {error}"))
    else:
        future.set_exception(error)
