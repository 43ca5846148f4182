"""A reward worker: `python -m asyncrl.rewards.worker PARENT STATUS PROCESSES`.

Calls queue up in the worker's input. They are answered one after the other, or, if a function is
async, run concurrently in one event loop; the pool sends at most `rewards.concurrency`. A call that
exceeds the timeout, counted from its first function, is cancelled; the others continue. Built-in
functions that block take turns in threads. If any other function blocks the loop, or does not end
when it is cancelled, the pool kills the worker. Import-light: no torch, no pydantic.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from asyncrl.rewards import protocol
from asyncrl.rewards.scoring import LoadedTerm, Turns, finish, score
from asyncrl.rewards.services import calls
from asyncrl.user_code.streams import Ready, last_lines
from asyncrl.user_code.worker import Channel


def main() -> None:
    """Serve until standard input ends."""
    channel = Channel(protocol.ToWorker)
    setup = channel.read()
    if not isinstance(setup, protocol.Setup):
        return
    names = ", ".join(term.name for term in setup.terms)
    wanted = setup.terms
    terms = channel.load(
        setup.search_path,
        f"the rewards ({names})",
        lambda: [LoadedTerm.load(term) for term in wanted],
    )
    if terms is None:
        return
    asynchronous = any(term.asynchronous for term in terms)
    channel.send(Ready(asynchronous))
    if asynchronous:
        asyncio.run(_serve_concurrently(channel, terms, setup.timeout_seconds))
        return
    while isinstance(message := channel.read(), protocol.Call):
        channel.send(finish(score(message, terms, channel.send)))


async def _serve_concurrently(
    channel: Channel, terms: list[LoadedTerm], timeout_seconds: float
) -> None:
    """Answer calls until the stream ends; then abandon those in progress."""
    running: set[asyncio.Task[None]] = set()
    turns = Turns()
    async for message in channel.messages():
        task = asyncio.create_task(_answer(channel, message, terms, timeout_seconds, turns))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(
    channel: Channel,
    call: protocol.Call,
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
        channel.send(message)

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
    channel.send(msgspec.structs.replace(answer, uses=tuple(state.uses)) if state.uses else answer)


if __name__ == "__main__":
    main()
