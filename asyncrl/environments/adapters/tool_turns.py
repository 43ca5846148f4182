"""Environments whose turns call tools: a user's functions, or methods of an object.

Each call in a turn is answered, in order, with a message of role `tool`; a turn without calls ends
the sample. An invalid call and a tool that raises are answered with the error, because the model
made the mistake or can work around it. Results longer than `max_result_characters` are cut in the
middle.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, get_args

from asyncrl.environments.protocol import Action, Message, Replay, StepResult
from asyncrl.environments.tool_functions import FunctionTool, result_text
from asyncrl.errors import RewardError

MAX_RESULT_CHARACTERS = 10_000


class ToolTurns:
    """Runs the calls of each turn one after the other, and bounds their answers."""

    def __init__(
        self,
        tools: Sequence[FunctionTool],
        *,
        replay: Replay | None,
        max_result_characters: int = MAX_RESULT_CHARACTERS,
    ) -> None:
        self._by_name = {tool.name: tool for tool in tools}
        self._max_characters = max_result_characters
        self.tools = [tool.schema for tool in tools]
        self.replay = replay

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        """Keep the row's prompt."""

    def step(self, action: Action) -> Any:
        """Run the calls; without any, the sample ends."""
        messages = [tool_message(call, self._finished(call)) for call in action.tool_calls]
        return StepResult(messages, done=not messages, reward=self.reward(done=not messages))

    def reward(self, *, done: bool) -> Any:
        """Return the reward of the turn whose calls have been made; awaitable in async classes."""
        del done
        return 0.0

    def answer(self, call: dict[str, Any]) -> str | Awaitable[str]:
        """Return the answer that the model reads; awaitable if the tool is async."""
        if call.get("error"):
            return f"error: {call['error']}"
        tool = self._by_name.get(str(call.get("name")))
        if tool is None:
            known = ", ".join(self._by_name)
            return f"error: there is no tool {call.get('name')!r}, there are: {known}"
        arguments, wrong = tool.arguments(call.get("arguments") or {})
        if wrong:
            return f"error: {wrong}"
        try:
            result = tool.function(**arguments)
            return self._awaited(result) if inspect.isawaitable(result) else self._text(result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an answer to the model
            return self._error(error)

    async def _awaited(self, result: Awaitable[Any]) -> str:
        try:
            return self._text(await result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an answer to the model
            return self._error(error)

    def _finished(self, call: dict[str, Any]) -> str:
        """Return the answer, awaited here if a tool turned out to be async only when called."""
        answer = self.answer(call)
        return answer if isinstance(answer, str) else asyncio.run(_ready(answer))

    def _text(self, result: Any) -> str:
        return shortened(result_text(result), self._max_characters)

    def _error(self, error: BaseException) -> str:
        return shortened(f"error: {type(error).__name__}: {error}", self._max_characters)


class AsyncToolTurns(ToolTurns):
    """A `ToolTurns` with at least one async tool; the others run in the event loop too."""

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, the sample ends."""
        calls = action.tool_calls
        messages = [tool_message(call, await _ready(self.answer(call))) for call in calls]
        reward = await _ready(self.reward(done=not messages))
        return StepResult(messages, done=not messages, reward=reward)


def shortened(text: str, most: int) -> str:
    """Return a text that can be encoded; a text that is too long keeps its beginning and end."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= most:
        return text
    half = most // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half :]}"


def tool_message(call: dict[str, Any], content: str) -> Message:
    """Return the answer to a call as a chat message."""
    message = {"role": "tool", "name": str(call.get("name")), "content": content}
    return message | ({"tool_call_id": call["id"]} if "id" in call else {})


def replay_of(args: dict[str, Any], name: str, default: Replay | None) -> Replay | None:
    """Read an adapter's argument `replay`. Raises RewardError."""
    replay: Replay | None = args.get("replay", default)
    if replay not in (*get_args(Replay), None):
        raise RewardError(
            f"environment {name}: `replay` must be one of {', '.join(get_args(Replay))} or null, "
            f"got {replay!r}"
        )
    return replay


def longest_result(args: dict[str, Any], name: str) -> int:
    """Read an adapter's argument `max_result_characters`. Raises RewardError."""
    most = args.get("max_result_characters", MAX_RESULT_CHARACTERS)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise RewardError(
            f"environment {name}: max_result_characters must be a whole number from 1, got {most!r}"
        )
    return most


def passed_on(args: dict[str, Any], key: str, name: str, given: str) -> dict[str, Any]:
    """Return the mapping under `key`, which must not contain `given`. Raises RewardError."""
    found = args.get(key, {})
    if not isinstance(found, dict) or given in found:
        raise RewardError(
            f"environment {name}: `{key}` must be a mapping without {given!r}, which is already "
            f"set, got {found!r:.200}"
        )
    return found


def refuse_unknown(args: dict[str, Any], name: str, known: Sequence[str]) -> None:
    """Refuse arguments that an adapter does not take. Raises RewardError."""
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise RewardError(
            f"environment {name} does not take {', '.join(unknown)}; it takes {', '.join(known)}"
        )


async def _ready(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
