"""Plain Python functions as tools: `python_tools:my_tools.py:add,my_tools.py:look_up`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.environments.adapters import tool_turns
from asyncrl.environments.tool_functions import FunctionTool
from asyncrl.errors import RewardError, UserError
from asyncrl.user_code import loading as user_functions

_KIND = user_functions.FunctionKind("tool", "function(**arguments)", ())


def adapt(rest: str, args: dict[str, Any]) -> Callable[[], tool_turns.ToolTurns]:
    """Return a factory for `rest`, functions separated by commas. Raises RewardError."""
    name = f"python_tools:{rest}"
    tool_turns.refuse_unknown(args, name, ["replay", "max_result_characters"])
    replay = tool_turns.replay_of(args, name, "recorded")
    most = tool_turns.longest_result(args, name)
    tools = [_tool(one.strip()) for one in rest.split(",") if one.strip()]
    names = [tool.name for tool in tools]
    twice = [one for one in names if names.count(one) > 1]
    if twice:
        raise RewardError(f"environment {name}: two tools are called {twice[0]!r}")
    if not tools:
        raise RewardError(f"environment {name} names no function")
    asynchronous = any(inspect.iscoroutinefunction(tool.function) for tool in tools)
    kind = tool_turns.AsyncToolTurns if asynchronous else tool_turns.ToolTurns
    return partial(kind, tools, replay=replay, max_result_characters=most)


def _tool(name: str) -> FunctionTool:
    found = user_functions.load_object(_KIND, name)
    if not callable(found):
        raise RewardError(f"tool {name!r} is a {type(found).__name__}, not a function")
    try:
        return FunctionTool(found)
    except UserError as error:
        raise RewardError(f"tool {name!r}: {error}") from error
