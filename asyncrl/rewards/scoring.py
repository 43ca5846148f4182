"""Scoring of one call in a worker: the functions in turn, their values checked and added up.

Import-light: a worker process loads this file.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.rewards.examples import argument_for, wants_row
from asyncrl.rewards.functions import RewardFunction
from asyncrl.rewards.loading import load_function
from asyncrl.rewards.protocol import WHOLE_SUM, Began, Call, Failed, Scored, Term
from asyncrl.rewards.values import BadValueError, as_float32, as_number

TRACEBACK_LINES = 8
"""Lines of the user's traceback that an error message quotes."""
MESSAGE_CHARACTERS = 4000
"""Longest message about a failure."""


@dataclass(frozen=True, slots=True)
class LoadedTerm:
    """One function of the weighted sum, imported."""

    function: RewardFunction
    weight: float
    args: dict[str, Any]
    row_only: bool
    """See `argument_for`."""
    asynchronous: bool
    """Whether calling it gives an awaitable."""

    @classmethod
    def load(cls, term: Term) -> LoadedTerm:
        """Import the function. Raises RewardError, and what the user's module raises."""
        function = load_function(term.name, term.args)
        return cls(function, term.weight, term.args, wants_row(function), is_async(function))


def is_async(function: Any) -> bool:
    """Whether this is an `async def` function, or an object whose `__call__` is one."""
    called = getattr(type(function), "__call__", None)  # noqa: B004 - its type is asked for
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def score(
    call: Call, terms: list[LoadedTerm], began: Callable[[Began], None]
) -> Scored | Failed:
    """Call each function and add up the weighted values.

    Without async functions this never waits, so that `finish` can run it without an event loop.

    Args:
        call: the response to score.
        terms: the functions.
        began: is told of each term as it starts.
    """
    values: list[float] = []
    started, index = time.perf_counter(), 0
    try:
        for index, term in enumerate(terms):
            began(Began(call.call, index))
            example = argument_for(call.example, row_only=term.row_only)
            result: Any = term.function(call.prompt, call.response, example, **term.args)
            if term.asynchronous:
                result = await result
            values.append(as_number(result))
        index = WHOLE_SUM
        weighted = [term.weight * value for term, value in zip(terms, values, strict=True)]
        total = as_float32(sum(weighted), "the weighted sum of the rewards must be")
    except BadValueError as error:
        return Failed(call.call, index, error.reason, bounded(str(error)))
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001 - process edge: reported
        return Failed(call.call, index, "raised", last_lines())
    return Scored(call.call, total, tuple(values), time.perf_counter() - started)


def finish(scoring: Any) -> Scored | Failed:
    """Run a coroutine that never waits to its end."""
    try:
        scoring.send(None)
    except StopIteration as done:
        result: Scored | Failed = done.value
        return result
    raise RuntimeError("a function that is not async waited")


def last_lines() -> str:
    """The end of the traceback of the exception that is being handled."""
    lines = traceback.format_exc().strip().splitlines()
    return bounded("\n".join(lines[-TRACEBACK_LINES:]))


def bounded(text: str) -> str:
    """A message that can be encoded and is not too long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    half = MESSAGE_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"
