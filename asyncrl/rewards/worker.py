"""A reward worker: `python -m asyncrl.rewards.worker PARENT STATUS PROCESSES`.

Calls queue up in the worker's input. They are answered one after the other, or, if a function is
async, run concurrently in one event loop; the pool sends at most `rewards.concurrency`. A call that
exceeds the timeout, counted from its first function, is cancelled; the others continue. Built-in
functions that block take turns in threads. If any other function blocks the loop, or does not end
when it is cancelled, the pool kills the worker. Import-light: no torch, no pydantic, and asyncio,
a third of the start, only for an event loop.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from asyncrl.cores import usable_cores
from asyncrl.rewards import protocol
from asyncrl.rewards.functions import RewardFunction, load_function
from asyncrl.rewards.protocol import WHOLE_SUM, Began, Call, Failed, FailureReason, Scored, Term
from asyncrl.rewards.services import calls
from asyncrl.rewards.values import (
    Convention,
    NoRewardError,
    arguments_for,
    as_float32,
    convention_of,
    is_unavailable,
    value_of,
)
from asyncrl.user_code.streams import Ready, bounded, last_lines
from asyncrl.user_code.worker import Channel

AT_ONCE = {"code": usable_cores(), "math_verify": 1}
"""Most concurrent calls of a built-in function. Programs run in separate processes, one for each
core; more would wait for each other and use up their time."""


class Turns:
    """Runs functions that block. Used from one event loop."""

    def __init__(self) -> None:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        self._rooms = {name: asyncio.Semaphore(most) for name, most in AT_ONCE.items()}
        self._threads = ThreadPoolExecutor(sum(AT_ONCE.values()))

    async def run(self, name: str, function: Callable[[], Any], begin: Callable[[], None]) -> Any:
        """Call `begin`, then the built-in function `name` with its arguments, when its turn comes.

        The function continues to its end even if the caller is cancelled.
        """
        import asyncio

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
                done.exception()  # the caller gets it, unless it was cancelled

        running.add_done_callback(ended)
        return await asyncio.shield(running)


@dataclass(frozen=True, slots=True)
class LoadedTerm:
    """One function of the weighted sum, imported."""

    function: RewardFunction
    weight: float
    args: dict[str, Any]
    convention: Convention
    asynchronous: bool
    """A call returns an awaitable, which is known before the first one."""
    takes_turns: str | None = None
    """The name in `AT_ONCE` of a built-in function that blocks."""

    @classmethod
    def load(cls, term: Term) -> LoadedTerm:
        """Import the function. Raises RewardError, and errors of the user's module."""
        function = load_function(term.name, term.args)
        turns = term.name if term.name in AT_ONCE else None
        convention = convention_of(function)
        return cls(function, term.weight, term.args, convention, is_async(function), turns)


def is_async(function: Any) -> bool:
    """Return True for an `async def` function, or an object whose `__call__` is one.

    Behind a decorator, only its first call shows it.
    """
    called = getattr(type(function), "__call__", None)  # noqa: B004 - its type is asked for
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


class WaitsError(Exception):
    """A function returned an awaitable, which was not begun, outside an event loop."""


async def score(
    call: Call, terms: list[LoadedTerm], began: Callable[[Began], None], turns: Turns | None = None
) -> Scored | Failed:
    """Call each function, after `began`, and add up the weighted values.

    Without `turns` this never waits, so `finish` can run it without an event loop; raises
    WaitsError if it had to. With `turns`, functions that take turns come first, so that the call's
    time begins with its turn.
    """
    values: list[float | None] = [None] * len(terms)
    started, index = time.perf_counter(), 0
    order = range(len(terms))
    first = sorted(order, key=lambda place: terms[place].takes_turns is None)
    try:
        for index in order if turns is None else first:
            term = terms[index]
            begin = partial(_begin, began, Began(call.call, index))
            given, named = arguments_for(term.convention, call.prompt, call.response, call.example)
            function = partial(term.function, *given, **named, **term.args)
            if turns is not None and term.takes_turns is not None:
                result = await turns.run(term.takes_turns, function, begin)
            else:
                begin()
                result = function()
            if inspect.isawaitable(result):
                if turns is None:
                    getattr(result, "close", int)()
                    raise WaitsError
                result = await result
            values[index] = value_of(term.convention, result)
        index = WHOLE_SUM
        both = zip(terms, values, strict=True)
        weighted = [term.weight * value for term, value in both if value is not None]
        total = as_float32(sum(weighted), "the weighted sum of the rewards must be")
    except WaitsError:
        raise
    except NoRewardError as error:
        return Failed(call.call, index, error.reason, bounded(str(error)))
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001 - process edge: reported
        reason: FailureReason = "unavailable" if is_unavailable(sys.exception()) else "raised"
        return Failed(call.call, index, reason, last_lines())
    return Scored(call.call, total, tuple(values), time.perf_counter() - started)


def _begin(began: Callable[[Began], None], message: Began) -> None:
    began(message)
    calls.begin_term(message.term)


def finish(scoring: Any) -> Scored | Failed:
    """Run a coroutine that never waits to its end. Raises WaitsError as `score` does."""
    try:
        scoring.send(None)
    except StopIteration as done:
        result: Scored | Failed = done.value
        return result
    raise RuntimeError("a function that is not async waited")


def main() -> None:
    """Serve until standard input ends."""
    channel = Channel(protocol.ToWorker)
    setup = channel.read()
    if not isinstance(setup, protocol.Setup):
        return
    wanted = setup.terms
    what = f"the rewards ({', '.join(term.name for term in wanted)})"
    terms = channel.load(setup.search_path, what, lambda: [LoadedTerm.load(one) for one in wanted])
    if terms is None:
        return
    asynchronous = any(term.asynchronous for term in terms)
    channel.send(Ready(asynchronous))
    first: Call | None = None
    if not asynchronous:
        while isinstance(message := channel.read(), Call):
            try:
                channel.send(finish(score(message, terms, channel.send)))
            except WaitsError:
                first = message
                channel.send(Ready(asynchronous=True))
                break
        else:
            return
    import asyncio

    asyncio.run(_serve_concurrently(channel, terms, setup.timeout_seconds, first))


async def _serve_concurrently(
    channel: Channel, terms: list[LoadedTerm], timeout_seconds: float, first: Call | None
) -> None:
    """Answer `first` and then calls until the stream ends; then abandon those in progress."""
    import asyncio

    running: set[asyncio.Task[None]] = set()
    turns = Turns()

    def begin(message: Call) -> None:
        task = asyncio.create_task(_answer(channel, message, terms, timeout_seconds, turns))
        running.add(task)
        task.add_done_callback(running.discard)

    if first is not None:
        begin(first)
    async for message in channel.messages():
        begin(message)


async def _answer(
    channel: Channel, call: Call, terms: list[LoadedTerm], timeout_seconds: float, turns: Turns
) -> None:
    import asyncio

    state = calls.begin(timeout_seconds)
    limit = asyncio.timeout(None)
    task = asyncio.current_task()

    def began(message: Began) -> None:
        if limit.when() is None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout_seconds)
            state.cancelled_at = time.monotonic() + timeout_seconds
        channel.send(message)

    try:
        async with limit:
            answer = await score(call, terms, began, turns)
    except TimeoutError:
        answer = Failed(call.call, state.term, "timeout", "")
    except asyncio.CancelledError:
        if task is None or task.cancelling():  # the worker ends
            raise
        answer = Failed(call.call, state.term, "raised", last_lines())
    if limit.expired():  # the function turned its cancellation into a result
        answer = Failed(call.call, state.term, "timeout", "")
    channel.send(msgspec.structs.replace(answer, uses=tuple(state.uses)) if state.uses else answer)


if __name__ == "__main__":
    main()
