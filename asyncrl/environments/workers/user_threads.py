"""Threads that run the user's code in a worker, and the count of those that hang.

A thread cannot be stopped from outside. One whose caller has given up is *left behind*: it is
counted until its code returns, and the pool replaces a process with too many (`lane`). All are
daemons, so they do not keep the process alive. Import-light: worker processes load this file.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class LeftBehind:
    """The threads of this process that were left behind, until they end."""

    def __init__(self) -> None:
        self._since: dict[threading.Thread, float] = {}

    def add(self, thread: threading.Thread, *, waited: bool) -> None:
        """Count a thread from now on if its time is over (`waited`), else after some patience."""
        self._since[thread] = -float("inf") if waited else time.monotonic()

    def count(self, patience: float) -> int:
        """Count those that still run, `patience` seconds after they were left behind."""
        self._since = {one: since for one, since in self._since.items() if one.is_alive()}
        latest = time.monotonic() - patience
        return sum(since <= latest for since in self._since.values())


LEFT_BEHIND = LeftBehind()


class SessionThread:
    """Runs a session's calls one after the other, always in the same thread."""

    def __init__(self, name: str = "asyncrl-environment") -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False
        """The thread runs the user's code."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a method and return its result, or raise its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.busy = True
        self._calls.put((method, args, loop, future))
        return await future

    def end(self, *, waited: bool = True) -> None:
        """End the thread after its call; during a call it counts as left behind."""
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
    """Run an agent in its own thread, which is left behind if the caller is cancelled."""

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
