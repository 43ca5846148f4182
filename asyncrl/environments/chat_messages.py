"""Normalises chat messages and compares them. Pure.

Clients return a conversation in a form other than the one they received: content as parts, fields
that are None, reformatted JSON arguments, reasoning in a separate field. Such differences do not
begin a new conversation; a different word does. Import-light: worker processes load this file.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_READ = ("function_call", "audio")
"""Message fields with content that chat templates do not show."""


class RefusedCallError(Exception):
    """A request cannot be served; the message addresses the agent's author."""

    def __init__(self, message: str, *, status: int = 400, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        error = {"message": str(self), "type": "invalid_request_error", "param": self.parameter}
        return {"error": error | {"code": None}}


def chat_message(message: Any) -> Message:
    """Convert a client's message for chat templates. Raises RefusedCallError if impossible."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise _refused(f"a message has the role {role!r}; use {', '.join(_ROLES)}")
    for name in _NOT_READ:
        if message.get(name):
            raise _refused(f"a message has {name}, which is not supported; use `tool_calls`")
    content = _text(message.get("content"))
    if not isinstance(content, str):
        raise _refused("the content of a message must be a text, or parts that are texts")
    out: Message = {"role": _role(message), "content": content}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if reasoning := _given_reasoning(message):
        out["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(_name_of_call(one) for one in calls):
            raise _refused("a tool call must have a function with a name")
        out["tool_calls"] = [_call(one) for one in calls]
    return out


def new_messages(known: Sequence[Message], messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages added to a known conversation, or None if it is not continued."""
    if len(messages) <= len(known) or not all(map(mean_the_same, known, messages)):
        return None
    return list(messages[len(known) :])


def mean_the_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two messages say the same, whatever form a client has sent them in.

    An assistant's name counts only if both have one: clients name answers that came without a name.
    """
    if one is other:
        return True
    role = _role(one)
    if role != _role(other):
        return False
    names = one.get("name") or None, other.get("name") or None
    if names[0] != names[1] and (role != "assistant" or None not in names):
        return False
    if (one.get("tool_call_id") or None) != (other.get("tool_call_id") or None):
        return False
    calls = one.get("tool_calls") or None, other.get("tool_calls") or None
    if calls != (None, None) and not _are_equal(*map(_essence_of_calls, calls)):
        return False
    same = one.get("content"), _given_reasoning(one)
    if isinstance(same[0], str) and same == (other.get("content"), _given_reasoning(other)):
        return True
    return _are_equal(_words(one, calls[0]), _words(other, calls[1]))


def _role(message: Mapping[str, Any]) -> Any:
    role = message.get("role")
    return "system" if role == "developer" else role


def _words(message: Mapping[str, Any], calls: Any) -> list[Any]:
    """Return a message's reasoning and text without surrounding white space, which varies."""
    text, given = _text(message.get("content")), _given_reasoning(message).strip()
    if not isinstance(text, str) or message.get("role") != "assistant":
        return [text]
    before, end, after = text.partition("</think>")
    if end:
        inside = before.strip().removeprefix("<think>").strip()
        further = None if given in ("", inside) else given
        return [inside, after.strip(), further]
    return [given, text.strip() if given or calls else text, None]


def _given_reasoning(message: Mapping[str, Any]) -> str:
    for name in ("reasoning_content", "reasoning"):
        given = message.get(name)
        if isinstance(given, str) and given.strip():
            return given
    return ""


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def _name_of_call(call: Any) -> str | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _call(call: Any) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a policy need not write JSON
            arguments = json.loads(arguments)
    inner = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": inner}


def _essence_of_calls(calls: Any) -> Any:
    if not isinstance(calls, list):
        return calls
    return [_call(one) if _name_of_call(one) is not None else one for one in calls]


def _are_equal(one: Any, other: Any) -> bool:
    """Compare as JSON: True is not 1, but 1.0 is, and keys are unordered."""
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs += [(a[key], b[key]) for key in a]
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, bool) != isinstance(b, bool) or a != b:
            return False
    return True


def _refused(text: str) -> RefusedCallError:
    return RefusedCallError(text, parameter="messages")
