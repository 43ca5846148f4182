"""Classes for TRL's `environment_factory`: `trl:my_envs.py:Wordle`. TRL itself is not needed.

Such a class has a method `reset(**row)`, whose result is appended to the row's last user message;
every other public method is a tool, and an optional `get_reward()` scores the current state. Each
turn's reward is its change. With `score: end`, the reward is read once, after a turn without a
call, so a truncated sample has none.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.environments.adapters import tool_turns
from asyncrl.environments.protocol import Message, Replay
from asyncrl.environments.tool_functions import FunctionTool
from asyncrl.errors import RewardError, UserError
from asyncrl.user_code import loading as user_functions

_KIND = user_functions.FunctionKind("environment", "factory()", ())
_NOT_TOOLS = ("reset", "get_reward")
_SCORES = ("each_turn", "end")


class TrlEnvironment(tool_turns.ToolTurns):
    """One instance of the class, driven by `reset` and `step`."""

    def __init__(
        self, made: Any, *, replay: Replay | None, each_turn: bool, max_result_characters: int
    ) -> None:
        tools = [FunctionTool(method) for method in _methods(made)]
        super().__init__(tools, replay=replay, max_result_characters=max_result_characters)
        self._made, self._each_turn = made, each_turn
        self._before = 0.0

    def reset(self, row: dict[str, Any], seed: int) -> list[Message] | None:
        """Reset with the row's columns; append the text to the last user message."""
        del seed
        columns = _columns(row)
        return _with_text(columns, self._made.reset(**columns))

    def reward(self, *, done: bool) -> Any:
        """Return the change of `get_reward`."""
        if not hasattr(self._made, "get_reward") or not (done or self._each_turn):
            return 0.0
        now = self._made.get_reward()
        return self._later_change(now) if inspect.isawaitable(now) else self._change(now)

    def _change(self, now: Any) -> float:
        before, self._before = self._before, float(now)
        return self._before - before

    async def _later_change(self, now: Awaitable[Any]) -> float:
        return self._change(await now)


class AsyncTrlEnvironment(tool_turns.AsyncToolTurns, TrlEnvironment):
    """A `TrlEnvironment` with at least one async method."""

    async def reset(self, row: dict[str, Any], seed: int) -> list[Message] | None:  # type: ignore[override]
        """Reset with the row's columns; append the text to the last user message."""
        del seed
        columns = _columns(row)
        text = self._made.reset(**columns)
        return _with_text(columns, await text if inspect.isawaitable(text) else text)


def adapt(rest: str, args: dict[str, Any]) -> Callable[[], TrlEnvironment]:
    """Return a factory for `rest`, a class or function that makes instances. Raises RewardError."""
    name = f"trl:{rest}"
    tool_turns.refuse_unknown(args, name, ["replay", "score", "max_result_characters"])
    score = args.get("score", "each_turn")
    if score not in _SCORES:
        raise RewardError(f"environment {name}: `score` must be one of {', '.join(_SCORES)}")
    factory = user_functions.load_function(_KIND, rest, {})
    tried = factory()
    if not callable(getattr(tried, "reset", None)):
        raise RewardError(f"environment {name}: {type(tried).__name__} has no method `reset`")
    methods = _methods(tried)
    if not methods:
        raise RewardError(f"environment {name}: {type(tried).__name__} has no public method")
    try:
        for method in methods:
            FunctionTool(method)
    except UserError as error:
        raise RewardError(f"environment {name}: {error}") from error
    own = [getattr(tried, one) for one in _NOT_TOOLS if hasattr(tried, one)]
    asynchronous = any(inspect.iscoroutinefunction(one) for one in (*methods, *own))
    kind = AsyncTrlEnvironment if asynchronous else TrlEnvironment

    replay = tool_turns.replay_of(args, name, "deterministic")
    most, each_turn = tool_turns.longest_result(args, name), score == "each_turn"
    return lambda: kind(factory(), replay=replay, each_turn=each_turn, max_result_characters=most)


def _methods(made: Any) -> list[Callable[..., Any]]:
    """Return the tools: the public methods of the class. Properties are not read."""
    names = [n for n, _ in inspect.getmembers(type(made), inspect.isfunction) if n[0] != "_"]
    return [getattr(made, name) for name in names if name not in _NOT_TOOLS]


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    own = row.get("row")
    return dict(own) if isinstance(own, dict) else row


def _with_text(row: dict[str, Any], text: Any) -> list[Message] | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"reset must return a text or None, got {type(text).__name__}")
    prompt = row.get("prompt", "")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{text}"}]
