"""Finds the tool calls of a turn and checks them against the tools. Pure; nothing raises.

The model reads a call's error as the tool's result, so that it can learn from it: unreadable JSON,
an unknown tool, arguments that do not fit the schema.

Schemas come from agents and servers, arguments from the policy, and the check runs in the
generator's event loop, where all samples wait for it. So it is bounded by an amount of work, which
is the same whenever the same call is checked. Not enforced:

- `pattern`, `patternProperties` and `unevaluated...`: a regular expression can take for ever;
- `format`, as JSON Schema has it by default;
- `$ref` to anything but a place in the schema itself (`#/$defs/...`), and `$dynamicRef`;
- a schema that is wrong, calls itself without an end, or takes more work than the bound: nothing of
  it is enforced.
"""

import difflib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from asyncrl.environments.tool_formats import ToolFormat, WrittenCall, load_json, read_turn
from asyncrl.tasks.templates.chat_template import Message, Tools

_MAX_WORK = 20_000
"""Limit of a check, in units of about 10 µs: one keyword, or ten of its values."""
_VALUES, _CHARACTERS = 10, 10_000
"""This many values of a keyword cost as much as a keyword; this many characters of the arguments
double the cost of each keyword."""
_OFF = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef")

Keyword = Callable[[Any, Any, Any, Any], Any]
"""A keyword of jsonschema: validator, keyword value, instance, schema."""


class _TooMuchError(Exception):
    """The work is used up."""


class _Check:
    def __init__(self, schema: Mapping[str, Any], characters: int) -> None:
        self.schema = schema
        self._left = float(_MAX_WORK)
        self._factor = 1 + characters / _CHARACTERS

    def charge(self, values: int) -> None:
        self._left -= (1 + values / _VALUES) * self._factor
        if self._left < 0:
            raise _TooMuchError


_CHECK: ContextVar[_Check] = ContextVar("check")


def misfit(arguments: dict[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Describe a misfit; None if all fits or the schema cannot be used."""
    from jsonschema.exceptions import best_match

    try:
        plain = _without_names(schema)
        _CHECK.set(_Check(plain, len(repr(arguments))))
        error = best_match(_validator()(plain).iter_errors(arguments))
    except Exception:  # noqa: BLE001 - the schema is a stranger's: wrong types, RecursionError
        return None
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {error.message}" if place else str(error.message)


@functools.cache
def _validator() -> Any:
    """Return a jsonschema class whose keywords count their work."""
    from jsonschema import Draft202012Validator as Base
    from jsonschema.validators import create

    own = {"$ref": _ref, "additionalProperties": _without_patterns, "uniqueItems": _unique}
    every = Base.VALIDATORS.items()
    keywords = {name: _counted(own.get(name, one)) for name, one in every if name not in _OFF}
    return create(Base.META_SCHEMA, validators=keywords, type_checker=Base.TYPE_CHECKER)


def _without_names(schema: Any) -> Any:
    """Remove `$schema` and `$id`, which select other keywords and a search of everything."""
    if isinstance(schema, list):
        return [_without_names(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: _without_names(value)
        for name, value in schema.items()
        if not (name in ("$schema", "$id") and isinstance(value, str))
    }


def _counted(keyword: Keyword) -> Keyword:
    @functools.wraps(keyword)
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _CHECK.get().charge(len(value) if isinstance(value, list | dict | str) else 0)
        return keyword(validator, value, instance, schema)

    return counted


def _ref(validator: Any, ref: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Follow references into the schema itself only; others may be remote or need a search."""
    if not ref.startswith("#"):
        raise ValueError(ref)
    target: Any = _CHECK.get().schema
    for part in unquote(ref[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target[int(key)] if isinstance(target, list) else target[key]
    yield from validator.descend(instance, target)


def _without_patterns(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Accept any additional property if there are patterns, which are not evaluated."""
    from jsonschema import Draft202012Validator

    if not schema.get("patternProperties"):
        keyword = Draft202012Validator.VALIDATORS["additionalProperties"]
        yield from keyword(validator, value, instance, schema) or ()


def _unique(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import Draft202012Validator

    if isinstance(instance, list):
        _CHECK.get().charge(len(instance) ** 2 // 2)
        keyword = Draft202012Validator.VALIDATORS["uniqueItems"]
        yield from keyword(validator, value, instance, schema) or ()


CallError = Literal["json", "unknown_tool", "arguments"]
_ID_LENGTH = 9
"""Mistral's templates accept only ids of this length."""
_MAX_MESSAGE = 500
_COMPARED = 100
"""Limits, in characters and names, of the search for a name similar to an unknown tool's."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, right or wrong."""

    id: str
    """Nine letters and digits, the same whenever the same turn is parsed."""
    name: str
    arguments: dict[str, Any]
    error: str = ""
    """The error that the model reads instead of a result; empty if the call is right."""
    error_kind: CallError | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the call for `Action.tool_calls`, with `error` only if there is one."""
        call = {"id": self.id, "name": self.name, "arguments": self.arguments}
        return call | ({"error": self.error} if self.error else {})

    def as_message_part(self) -> dict[str, Any]:
        """Return the call for a message's `tool_calls`, as chat templates read it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn of the policy with its calls."""

    text: str
    content: str
    calls: tuple[ToolCall, ...]

    @property
    def message(self) -> Message:
        """Return the turn as a chat message; an unreadable call stays in its text."""
        if not self.calls or any(call.error_kind == "json" for call in self.calls):
            return {"role": "assistant", "content": self.text}
        parts = [call.as_message_part() for call in self.calls]
        return {"role": "assistant", "content": self.content, "tool_calls": parts}


def parse_turn(text: str, form: ToolFormat, tools: Tools | None, *, turn: int = 0) -> ParsedTurn:
    """Find the calls in a turn and check them.

    `text` includes special tokens but not the stop token; `form` is not `auto`. Without tools,
    calls are not looked for. `turn` is the turn's number in the conversation: ids of calls differ
    between turns.
    """
    if not tools:
        return ParsedTurn(text, text, ())
    written = read_turn(text, form)
    numbered = enumerate(written.calls)
    calls = tuple(checked_call(one, tools, _id_of(one, turn, index)) for index, one in numbered)
    return ParsedTurn(text, written.content.strip() if calls else text, calls)


def checked_call(call: WrittenCall, tools: Tools, call_id: str) -> ToolCall:
    """Check a written call against the tools."""
    functions = [one for tool in tools if isinstance(one := tool.get("function", tool), Mapping)]
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
    """Return an argument's value from its text: JSON, unless its schema has a string."""
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    own = known.get(name) if isinstance(known, Mapping) else None
    if isinstance(own, Mapping) and own.get("type") == "string":
        return text
    value, error = load_json(text)
    return text if error else value


def _misfit(arguments: dict[str, Any], schema: Any) -> str | None:
    """Describe a misfit with a JSON schema; None if all fits or the schema is invalid."""
    if not isinstance(schema, Mapping):
        return None
    known = schema.get("properties")
    if isinstance(known, Mapping) and schema.get("additionalProperties") is None:
        unknown = [name for name in arguments if name not in known]
        if unknown:
            names = ", ".join(map(str, known)) or "none"
            return f"unknown argument {unknown[0]!r}; it takes {names}"
    return misfit(arguments, schema)


def _id_of(call: WrittenCall, turn: int, index: int) -> str:
    if len(call.id) == _ID_LENGTH and call.id.isascii() and call.id.isalnum():
        return call.id
    text = f"{turn} {index} {call.text}".encode("utf-8", "replace")
    return hashlib.blake2b(text, digest_size=8).hexdigest()[:_ID_LENGTH]
