"""OpenEnv servers whose actions are calls of tools: `openenv:tools`.

Such a server offers MCP tools (OpenEnv's `MCPEnvironment`). They are listed when a session begins
and become the model's; a call in a turn becomes one step of the server, whose result is the answer.
A turn without a call ends the sample, as does a step that is `done`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.environments.adapters.tool_turns import shortened, tool_message
from asyncrl.environments.protocol import Action, Replay, StepResult
from asyncrl.environments.tool_functions import result_text


class OpenEnvTools:
    """One session on a server with tools.

    Args:
        connect: makes an `MCPToolClient`.
        observation: field of the first observation that is shown; None: the row's prompt stands.
        reset: for the server's reset.
        replay: see `asyncrl.environments.protocol`.
        max_result_characters: longest answer to a call.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        observation: str | None,
        reset: dict[str, Any],
        replay: Replay | None,
        max_result_characters: int,
    ) -> None:
        self._connect, self._field, self._reset = connect, observation, reset
        self.replay, self._most = replay, max_result_characters
        self.tools: list[dict[str, Any]] = []
        self._client: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """Open a session and list its tools."""
        await self.close()
        self._client = self._connect()
        await self._client.connect()
        result = await self._client.reset(
            **({"seed": seed % 2**31} | self._reset | row.get("reset", {}))
        )
        self.tools = [_schema(tool) for tool in await self._client.list_tools()]
        if not self.tools:
            raise RuntimeError("the server lists no tools; `openenv:generic` takes other actions")
        if self._field is None:
            return None
        values = result.observation.model_dump()
        if self._field not in values:
            raise KeyError(f"the observation has no field {self._field!r}; it has {list(values)}")
        return str(values[self._field])

    async def step(self, action: Action) -> StepResult:
        """Make the calls, one step of the server for each."""
        messages, reward, done = [], 0.0, not action.tool_calls
        for call in action.tool_calls:
            if call.get("error"):
                messages.append(tool_message(call, f"error: {call['error']}"))
                continue
            result = await self._client.step(_call(call))
            text = shortened(_answer(result.observation), self._most)
            messages.append(tool_message(call, text))
            reward += 0.0 if result.reward is None else result.reward
            if result.done:
                done = True
                break
        return StepResult(messages, done, reward)

    async def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _call(call: dict[str, Any]) -> Any:
    from openenv.core.env_server.mcp_types import CallToolAction

    given = call.get("arguments")
    return CallToolAction(
        tool_name=str(call.get("name")), arguments=given if isinstance(given, dict) else {}
    )


def _answer(observation: Any) -> str:
    """What the model is told: a tool's error is an answer to it."""
    error = getattr(observation, "error", None)
    if error is not None:
        return f"error: {error.message}"
    result = getattr(observation, "result", observation)
    if isinstance(result, dict) and "content" in result:  # an MCP result
        data = result.get("data")
        texts = "\n".join(str(part.get("text", "")) for part in result["content"] or ())
        result = texts if data is None else data
    return result_text(result)


def _schema(tool: Any) -> dict[str, Any]:
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": parameters,
        },
    }
