"""The agent program for verifiers, inside this process: alternating model and tool calls.

verifiers imports this module by the name `verifiers.HARNESS` and takes the class in `__all__`.
Every model call goes through verifiers' interception server, as its contract demands.
"""

import functools
import json
import ssl
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["PolicyHarness"]

_SECONDS = 86_400.0
"""A turn may wait for the policy as long as the run does; environment.step_timeout_seconds bounds
the environment's work only."""


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Load the certificates once: it takes 25 ms."""
    return ssl.create_default_context()


class PolicyHarnessConfig(HarnessConfig):  # type: ignore[misc]
    """The harness without settings."""


class PolicyHarness(Harness[PolicyHarnessConfig]):  # type: ignore[misc]
    """Asks the model until it calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run one segment: from the prompt, or a resumed conversation, to a turn without calls."""
        del trace, runtime, tool_interception_url
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        seconds = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": seconds} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=_SECONDS, trust_env=False, verify=_certificates())
            )
            while True:
                more = {"tools": tools} if tools else {}
                response = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages} | more,
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if response.status_code >= httpx.codes.BAD_REQUEST:
                    return ProgramResult(1, "", response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(0, "", "")
                for call in calls:
                    content = await _called(call["function"], dispatch, connections)
                    answer = {"role": "tool", "tool_call_id": call["id"], "content": content}
                    messages.append(answer | {"name": call["function"]["name"]})


async def _called(function: dict[str, Any], dispatch: Any, connections: Any) -> Any:
    name = function["name"]
    if name not in dispatch:
        return f"error: there is no tool {name!r}, there are: {', '.join(dispatch)}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be an object"
    return await call_mcp(connections, dispatch, name, arguments)
