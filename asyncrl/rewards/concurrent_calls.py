"""Async reward functions: the calls of one worker, run concurrently in one event loop.

The pool limits how many calls a worker has at once (`rewards.concurrency`). A call that takes
longer than the timeout is cancelled; the others continue. Its time begins with its first function.
Built-in functions that block take turns in threads; any other function that blocks the loop, or
that does not end when it is cancelled, is left to the pool, which kills the worker.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import msgspec

from asyncrl.rewards import protocol
from asyncrl.rewards.scoring import LoadedTerm, Turns, score
from asyncrl.rewards.services import calls
from asyncrl.user_code.streams import last_lines


def serve_concurrently(
    read: Callable[[], protocol.ToWorker | None],
    send: Callable[[protocol.FromWorker], None],
    terms: list[LoadedTerm],
    timeout_seconds: float,
) -> None:
    """Answer calls until the stream ends; then give up those that are running.

    Args:
        read: waits for the next message, None at the end of the stream.
        send: sends a message.
        terms: the functions.
        timeout_seconds: longest time for one call.
    """
    asyncio.run(_serve(read, send, terms, timeout_seconds))


async def _serve(
    read: Callable[[], protocol.ToWorker | None],
    send: Callable[[protocol.FromWorker], None],
    terms: list[LoadedTerm],
    timeout_seconds: float,
) -> None:
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[protocol.ToWorker | None] = asyncio.Queue()

    def receive() -> None:
        while True:
            message = read()
            loop.call_soon_threadsafe(arrived.put_nowait, message)
            if message is None:
                return

    # A daemon: the process ends although it is still reading.
    threading.Thread(target=receive, name="asyncrl-reward-calls", daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    turns = Turns()
    while isinstance(message := await arrived.get(), protocol.Call):
        task = asyncio.create_task(_answer(message, send, terms, timeout_seconds, turns))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(
    call: protocol.Call,
    send: Callable[[protocol.FromWorker], None],
    terms: list[LoadedTerm],
    timeout_seconds: float,
    turns: Turns,
) -> None:
    state = calls.begin(timeout_seconds)
    limit = asyncio.timeout(None)
    task = asyncio.current_task()

    def began(message: protocol.Began) -> None:
        if limit.when() is None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout_seconds)
            state.cancelled_at = time.monotonic() + timeout_seconds
        send(message)

    try:
        async with limit:
            answer = await score(call, terms, began, turns)
    except TimeoutError:
        answer = protocol.Failed(call.call, state.term, "timeout", "")
    except asyncio.CancelledError:
        if task is None or task.cancelling():  # the worker ends
            raise
        answer = protocol.Failed(call.call, state.term, "raised", last_lines())
    if limit.expired():  # the function turned its cancellation into a result
        answer = protocol.Failed(call.call, state.term, "timeout", "")
    send(msgspec.structs.replace(answer, uses=tuple(state.uses)) if state.uses else answer)
