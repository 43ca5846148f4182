"""Plain Python functions as tools: `python_tools:my_tools.py:add,my_tools.py:look_up`.

A function's name, docstring and type hints become its schema
(`asyncrl.environments.tool_functions`). The row's prompt stands, and `rewards.functions` score the
answer.

Replay is "recorded": any state of the functions comes from the sample's own calls, so their
recorded answers stand. `replay: deterministic` repeats the calls and compares the answers; `replay:
null` means that a call must not be repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.environments.adapters.tool_turns import (
    AsyncToolTurns,
    ToolTurns,
    longest_result,
    refuse_unknown,
    replay_of,
)
from asyncrl.environments.tool_functions import FunctionTool
from asyncrl.errors import RewardError, UserError
from asyncrl.user_code import loading as user_functions

_KIND = user_functions.FunctionKind(
    noun="tool", signature="function(**arguments)", arguments=(), error=RewardError
)


class PythonTools(ToolTurns):
    """A row's question, and functions to answer it with."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Keep the row's prompt."""


class AsyncPythonTools(AsyncToolTurns):
    """A `PythonTools` with at least one async function."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Keep the row's prompt."""


def adapt(rest: str, args: dict[str, Any]) -> Callable[[], PythonTools | AsyncPythonTools]:
    """Return a factory for `rest`, functions separated by commas. Raises RewardError."""
    name = f"python_tools:{rest}"
    refuse_unknown(args, name, ["replay", "max_result_characters"])
    replay = replay_of(args, name, "recorded")
    tools = [_tool(one.strip()) for one in rest.split(",") if one.strip()]
    names = [tool.name for tool in tools]
    twice = [one for one in names if names.count(one) > 1]
    if twice:
        raise RewardError(f"environment {name}: two tools are called {twice[0]!r}")
    if not tools:
        raise RewardError(f"environment {name} names no function")
    asynchronous = any(inspect.iscoroutinefunction(tool.function) for tool in tools)
    kind = AsyncPythonTools if asynchronous else PythonTools
    return partial(kind, tools, replay=replay, max_result_characters=longest_result(args, name))


def _tool(name: str) -> FunctionTool:
    found = user_functions.load_object(_KIND, name)
    if not callable(found):
        raise RewardError(f"tool {name!r} is a {type(found).__name__}, not a function")
    try:
        return FunctionTool(found)
    except UserError as error:
        raise RewardError(f"tool {name!r}: {error}") from error
