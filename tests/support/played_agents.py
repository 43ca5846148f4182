"""Agents that speak with the endpoint through the `openai` client, played without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai

from asyncrl.environments.agents.endpoint import Endpoint
from asyncrl.environments.agents.openai_messages import PolicySettings
from asyncrl.environments.agents.sessions import AgentEnvironment, ClientSettings, in_thread
from asyncrl.environments.protocol import Action
from asyncrl.environments.tool_calls import parse_turn

SECONDS = 120.0
QUESTION = {"role": "user", "content": "what is 1 + 1?"}
POLICY = PolicySettings(temperature=0.5, stop=("END",), stop_tokens=(9,), max_tokens=100)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def client_of(settings: ClientSettings) -> openai.OpenAI:
    return openai.OpenAI(base_url=settings.base_url, api_key=settings.api_key)


def action(text: str, tools: Any = None) -> Action:
    turn = parse_turn(text, "hermes", tools)
    calls = [one.as_dict() for one in turn.calls]
    return Action(text, list(range(len(text))), turn.message, calls, 100)


def environment_of(agent: Callable[..., Any]) -> AgentEnvironment:
    async def program(row: dict[str, Any], client: ClientSettings) -> Any:
        if asyncio.iscoroutinefunction(agent):
            return await agent(row, client)
        return await in_thread(lambda: agent(row, client))

    return AgentEnvironment(program, Endpoint(POLICY))


def run(scenario: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, SECONDS))


def play(agent: Callable[..., Any], turns: Sequence[str], row: Any = None) -> list[Any]:
    """What the environment of an agent says when the policy takes these turns."""

    async def scenario() -> list[Any]:
        environment = environment_of(agent)
        try:
            said: list[Any] = [await environment.reset(row or {}, 3)]
            said += [await environment.step(action(text, environment.tools)) for text in turns]
            return said
        finally:
            await environment.close()
            await environment._endpoint.stop()

    return list(run(scenario()))
