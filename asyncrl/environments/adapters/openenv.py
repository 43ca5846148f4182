"""Environments behind an OpenEnv server: `openenv:echo_env:EchoEnv`, `openenv:generic`, or `tools`.

The name is a client class, a subclass of OpenEnv's `EnvClient`. `generic` is its
`GenericEnvClient`, which does not need the environment's package; `tools` is its `MCPToolClient`,
whose actions, like those of its subclasses, are calls of the tools that the server lists when a
session begins. Every sample has its own session (WebSocket). docs/environments.md describes the
arguments. The row's column `reset`, the argument `reset` and the sample's seed are passed to the
server's reset.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncrl.environments.adapters import tool_turns
from asyncrl.environments.protocol import Action, Replay, StepResult
from asyncrl.environments.tool_functions import result_text
from asyncrl.errors import RewardError
from asyncrl.user_code import loading as user_functions


class _Session:
    """One session on an OpenEnv server; `observation` names the field to show."""

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
        self._client: Any = None

    async def _open(self, row: dict[str, Any], seed: int) -> Any:
        await self.close()
        self._client = self._connect()
        await self._client.connect()
        given = {"seed": seed % 2**31} | self._reset | row.get("reset", {})
        return await self._client.reset(**given)

    async def close(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _shown(self, observation: Any) -> str:
        values = observation.model_dump() if hasattr(observation, "model_dump") else observation
        if self._field is None:
            return values if isinstance(values, str) else json.dumps(values, default=str)
        if not isinstance(values, dict) or self._field not in values:
            fields = ", ".join(map(str, values)) if isinstance(values, dict) else type(values)
            raise KeyError(f"the observation has no field {self._field!r}; it has {fields}")
        return str(values[self._field])


class OpenEnvTools(_Session):
    """One session on a server with tools; `observation` None keeps the row's prompt."""

    tools: Sequence[dict[str, Any]] = ()

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """Open a session and list its tools."""
        result = await self._open(row, seed)
        self.tools = [_schema(tool) for tool in await self._client.list_tools()]
        if not self.tools:
            raise RuntimeError("the server lists no tools; use `openenv:generic` for other actions")
        return None if self._field is None else self._shown(result.observation)

    async def step(self, action: Action) -> StepResult:
        """Make the calls, one server step each."""
        messages, reward, done = [], 0.0, not action.tool_calls
        for call in action.tool_calls:
            if call.get("error"):
                messages.append(tool_turns.tool_message(call, f"error: {call['error']}"))
                continue
            result = await self._client.step(_call(call))
            text = tool_turns.shortened(_answer(result.observation), self._most)
            messages.append(tool_turns.tool_message(call, text))
            reward += 0.0 if result.reward is None else result.reward
            if result.done:
                done = True
                break
        return StepResult(messages, done, reward)


def _call(call: dict[str, Any]) -> Any:
    from openenv.core.env_server.mcp_types import CallToolAction

    return CallToolAction(tool_name=str(call.get("name")), arguments=call.get("arguments") or {})


def _answer(observation: Any) -> str:
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
    about = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": about}


_CLIENT = user_functions.FunctionKind("environment", "Client(base_url=...)", ())
_ACTION = user_functions.FunctionKind("environment.args.action", "function(text)", ("",))
_NOTHING = "(nothing)"
"""Shown to the policy instead of an empty text, such as the output of silent code."""
_KNOWN = ("base_url", "action", "observation", "reset", "replay", "client", "max_result_characters")


class OpenEnvEnvironment(_Session):
    """One session on a server whose actions `to_action` makes from the text of a turn."""

    def __init__(self, to_action: Callable[[str], Any], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._to_action = to_action

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """Open a session. If its observation is empty, the row's prompt stands."""
        return self._shown((await self._open(row, seed)).observation) or None

    async def step(self, action: Action) -> StepResult:
        """Send the turn."""
        result = await self._client.step(self._to_action(action.text))
        reward = 0.0 if result.reward is None else result.reward
        shown = tool_turns.shortened(self._shown(result.observation), self._most)
        return StepResult(shown or _NOTHING, bool(result.done), reward)


def adapt(rest: str, args: dict[str, Any]) -> Callable[[], OpenEnvEnvironment | OpenEnvTools]:
    """Return a factory for `rest`: a client class, `generic` or `tools`. Raises RewardError."""
    name = f"openenv:{rest}"
    tool_turns.refuse_unknown(args, name, _KNOWN)
    url = args.get("base_url")
    if not isinstance(url, str):
        raise RewardError(f"environment {name} needs `base_url`, such as http://127.0.0.1:8000")
    try:
        from openenv.core import GenericEnvClient, MCPToolClient
    except ImportError as error:
        raise RewardError(
            f"environment {name} needs OpenEnv, which conflicts with vLLM's packages: install "
            "msgspec and openenv in a separate interpreter and set environment.python "
            f"(docs/environments.md; {error})"
        ) from error
    own = {"generic": GenericEnvClient, "tools": MCPToolClient}
    client = own[rest] if rest in own else user_functions.load_object(_CLIENT, rest)
    more = tool_turns.passed_on(args, "client", name, "base_url")
    connect = partial(client, base_url=url, **more)
    settings: dict[str, Any] = {
        "observation": args.get("observation"),
        "reset": dict(args.get("reset", {})),
        "replay": tool_turns.replay_of(args, name, None),
        "max_result_characters": tool_turns.longest_result(args, name),
    }
    if isinstance(client, type) and issubclass(client, MCPToolClient):
        if "action" in args:
            raise RewardError(f"environment {name} does not take `action`: its actions call tools")
        return partial(OpenEnvTools, connect, **settings)
    to_action = _to_action(name, args.get("action"))
    return partial(OpenEnvEnvironment, to_action, connect, **settings)


def _to_action(name: str, action: Any) -> Callable[[str], Any]:
    if not isinstance(action, str):
        raise RewardError(
            f"environment {name} needs `action`: the field of its action that takes the turn's "
            "text, or your own function, path/to/file.py:function"
        )
    if ":" in action:
        return user_functions.load_function(_ACTION, action, {})
    return lambda text: {action: text}
