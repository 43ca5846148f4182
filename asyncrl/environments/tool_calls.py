"""A turn's calls of tools, checked against the tools that there are. Pure; nothing raises.

What is wrong with a call is told to the model as the tool's result, so that it can learn from it:
JSON that cannot be read, a tool that does not exist, arguments that do not fit its schema.

Example:
    >>> tools = [{"type": "function", "function": {"name": "add", "parameters": {
    ...     "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}]
    >>> text = '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>'
    >>> parse_turn(text, "hermes", tools).calls[0].result()["content"]
    "error: wrong arguments for add: a: 'x' is not of type 'integer'"
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.environments.schema_check import misfit
from asyncrl.environments.tool_formats import ToolFormat, WrittenCall, load_json, read_turn
from asyncrl.tasks.templates.chat_template import Message, Tools

CallError = Literal["json", "unknown_tool", "arguments"]
"""What is wrong with a call; counted by these names."""
_ID_LENGTH = 9
"""Mistral's templates take ids of this length only."""
_MAX_MESSAGE = 500
_COMPARED = 100
"""Characters of names, and names, that an unknown tool's name is compared with."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, right or wrong."""

    id: str
    """Of 9 letters and digits, the same whenever the same turn is parsed."""
    name: str
    """Of the tool; empty if it could not be read."""
    arguments: dict[str, Any]
    """Empty if they could not be read."""
    error: str = ""
    """What the model is told instead of a result; empty if the call is right."""
    error_kind: CallError | None = None

    def result(self, content: str | None = None) -> Message:
        """The tool's answer as a message: this content, or what is wrong with the call."""
        text = f"error: {self.error}" if content is None else content
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": text}

    def as_dict(self) -> dict[str, Any]:
        """For `Action.tool_calls`; `error` is there only if there is one."""
        call = {"id": self.id, "name": self.name, "arguments": self.arguments}
        return call | ({"error": self.error} if self.error else {})

    def as_message_part(self) -> dict[str, Any]:
        """For `tool_calls` of a message, as chat templates read it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the policy with its calls."""

    text: str
    """The whole turn."""
    content: str
    """The turn without its calls."""
    calls: tuple[ToolCall, ...]
    """In order."""

    @property
    def message(self) -> Message:
        """The turn as a chat message; a call that cannot be read stays in its text."""
        if not self.calls or any(call.error_kind == "json" for call in self.calls):
            return {"role": "assistant", "content": self.text}
        parts = [call.as_message_part() for call in self.calls]
        return {"role": "assistant", "content": self.content, "tool_calls": parts}


def parse_turn(text: str, form: ToolFormat, tools: Tools | None, *, turn: int = 0) -> ParsedTurn:
    """Find the calls in a turn and check them.

    Args:
        text: of the turn, special tokens included, without the stop token.
        form: of the calls, not `auto`.
        tools: that the model may call; without any, no call is looked for.
        turn: its number in the conversation; ids of calls differ between turns.
    """
    if not tools:
        return ParsedTurn(text, text, ())
    written = read_turn(text, form)
    calls = tuple(
        checked_call(call, tools, _id_of(call, turn, index))
        for index, call in enumerate(written.calls)
    )
    return ParsedTurn(text, written.content.strip() if calls else text, calls)


def checked_call(call: WrittenCall, tools: Tools, call_id: str) -> ToolCall:
    """A written call, compared with the tools that there are."""
    functions = [_function(tool) for tool in tools]
    schemas = {one["name"]: one for one in functions if isinstance(one.get("name"), str)}
    if call.error or not call.name:
        wrong = call.error or "a call is an object with `name` and `arguments`"
        return ToolCall(call_id, call.name, {}, wrong[:_MAX_MESSAGE], "json")
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    if call.in_texts:
        schema = schemas.get(call.name, {}).get("parameters")
        arguments = {name: _value(name, text, schema) for name, text in arguments.items()}
    if call.name not in schemas:
        short = [name for name in schemas if len(name) <= _COMPARED][:_COMPARED]
        near = difflib.get_close_matches(call.name[:_COMPARED], short, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        wrong = f"there is no tool {call.name[:80]!r}, there are: {', '.join(schemas)}{hint}"
        return ToolCall(call_id, call.name, arguments, wrong[:_MAX_MESSAGE], "unknown_tool")
    if not isinstance(call.arguments, dict):
        wrong = f"wrong arguments for {call.name}: they must be an object"
        return ToolCall(call_id, call.name, {}, wrong, "arguments")
    problem = _misfit(arguments, schemas[call.name].get("parameters"))
    if problem is not None:
        wrong = f"wrong arguments for {call.name}: {problem}"
        return ToolCall(call_id, call.name, arguments, wrong[:_MAX_MESSAGE], "arguments")
    return ToolCall(call_id, call.name, arguments)


def _value(name: str, text: str, schema: Any) -> Any:
    """The value of an argument that is written as a text: JSON, unless its schema has a string."""
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    own = known.get(name) if isinstance(known, Mapping) else None
    if isinstance(own, Mapping) and own.get("type") == "string":
        return text
    value, error = load_json(text)
    return text if error else value


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _misfit(arguments: dict[str, Any], schema: Any) -> str | None:
    """What does not fit a JSON schema; None if all fits, or the schema itself is wrong."""
    if not isinstance(schema, Mapping):
        return None
    known = schema.get("properties")
    if isinstance(known, Mapping) and schema.get("additionalProperties") is None:
        unknown = [name for name in arguments if name not in known]
        if unknown:
            return (
                f"unknown argument {unknown[0]!r}; it takes {', '.join(map(str, known)) or 'none'}"
            )
    return misfit(arguments, schema)


def _id_of(call: WrittenCall, turn: int, index: int) -> str:
    if len(call.id) == _ID_LENGTH and call.id.isascii() and call.id.isalnum():
        return call.id
    digest = hashlib.blake2b(
        f"{turn} {index} {call.text}".encode("utf-8", "replace"), digest_size=8
    )
    return digest.hexdigest()[:_ID_LENGTH]
