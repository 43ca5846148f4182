"""Built-in rewards that block, next to async ones: they take turns in threads.

The event loop continues meanwhile. Import-light: a worker process loads this file.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

AT_ONCE = {"code": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
           "math_verify": 1}  # fmt: skip
"""Calls of a built-in function that run at once. Programs run in processes of their own, one for
each core; more would wait for each other and use up the time of each."""


class Turns:
    """Runs functions that block. Used from one event loop."""

    def __init__(self) -> None:
        self._rooms = {name: asyncio.Semaphore(most) for name, most in AT_ONCE.items()}
        self._threads = ThreadPoolExecutor(sum(AT_ONCE.values()))

    async def run(self, name: str, function: Callable[[], Any], begin: Callable[[], None]) -> Any:
        """The function's result.

        Args:
            name: of the built-in function.
            function: with its arguments; ends by itself, also where its caller is cancelled.
            begin: is called when its turn has come.
        """
        room = self._rooms[name]
        await room.acquire()
        try:
            begin()
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, context.run, function)
        except BaseException:
            room.release()
            raise

        def ended(done: asyncio.Future[Any]) -> None:
            room.release()
            if not done.cancelled():
                done.exception()  # told to the caller, if there still is one

        running.add_done_callback(ended)
        return await asyncio.shield(running)
