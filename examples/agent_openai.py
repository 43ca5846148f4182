"""An agent written with the unchanged `openai` client: it adds with a tool of its own.

    pip install openai
    asyncrl run examples/agent_openai.yaml

Nothing in `answer` knows of asyncrl: it gets a client, and returns what the model said. `solve` is
what `environment.name` names: it makes the client that reaches the policy in training, and scores.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()
"""Shared by all samples of a worker: making one takes longer than all turns of a sample."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Add whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def calculator(expression: str) -> str:
    """The sum of the numbers in an expression such as 3+4."""
    parts = expression.split("+")
    return str(sum(map(int, parts))) if all(part.isdecimal() for part in parts) else "error"


def answer(client: OpenAI, model: str, question: str, turns: int = 3) -> str:
    """Ask, run the tool as often as the model calls it, and return its last words."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            if call.type == "function":
                arguments = json.loads(call.function.arguments)
                result = calculator(str(arguments.get("expression", "")))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def solve(row: dict[str, Any], client: Any) -> float:
    """One sample: 1 if the last number is the answer of the row.

    Args:
        row: of the task, with `prompt` and `answer`.
        client: how to reach the policy: `base_url`, `api_key` and `model`.
    """
    openai = OpenAI(base_url=client.base_url, api_key=client.api_key, http_client=HTTP)
    numbers = re.findall(r"\d+", answer(openai, client.model, row["prompt"]))
    return float(numbers[-1:] == [row["answer"]])
