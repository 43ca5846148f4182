"""Reads tool calls in the forms that models write them in. Pure; nothing raises.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>        Qwen, Hermes
              <tool_call><function=add><parameter=a>1</parameter></function>...    Qwen3-Coder
              <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>...        GLM-4.5
    llama     {"name": "add", "parameters": {"a": 1}}                              Llama 3.1
              <|python_tag|>brave_search.call(query="...")
    mistral   [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "..."}]   Mistral
              [TOOL_CALLS]add[ARGS]{"a": 1}
    json      {"name": "add", "arguments": {"a": 1}}, or a list of such objects

A turn's reasoning, up to the last `</think>`, holds no calls.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["auto", "hermes", "llama", "mistral", "json"]
"""The form of a model's calls; `auto`: the form named in its chat template."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as a model wrote it."""

    text: str
    name: str = ""
    arguments: Any = None
    """The model's arguments: an object, if they are right."""
    error: str = ""
    id: str = ""
    in_texts: bool = False
    """The arguments are texts: the tool's schema says which of them are JSON."""


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """A turn, split into content and calls."""

    content: str
    """The text without the calls, reasoning included."""
    calls: tuple[WrittenCall, ...]


def format_of_template(template: str | Mapping[str, str] | None) -> ToolFormat:
    """Return the tool-call form of a chat template; `json` if it names none."""
    text = "".join(template.values()) if isinstance(template, Mapping) else template or ""
    if "<tool_call>" in text:
        return "hermes"
    if "[TOOL_CALLS]" in text:
        return "mistral"
    if "<|python_tag|>" in text or ("ipython" in text and '"parameters"' in text):
        return "llama"
    return "json"


def read_turn(text: str, form: ToolFormat) -> WrittenTurn:
    """Read the calls of a turn's text, with special tokens but without the stop token.

    Example:
        >>> read_turn('so <tool_call>{"name": "add"}</tool_call>', "hermes").content
        'so '
    """
    reasoning, end, rest = text.rpartition("</think>")
    if not end and "<think>" in text:  # it never stopped thinking
        return WrittenTurn(text, ())
    content, calls = _READERS[form](rest)
    return WrittenTurn(reasoning + end + content, tuple(calls))


Found = tuple[str, list[WrittenCall]]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_BARE_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:<arg_key>|\Z)", re.ASCII)
_FENCED = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)
_BUILTIN = re.compile(r"([A-Za-z_]\w*)\.call\((.*)\)", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*([\w-]+)\s*)?(?:\[ARGS\]\s*)?(?={)", re.ASCII)
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS = "[TOOL_CALLS]"
CODE_TOOL = "code_interpreter"
"""The tool that code after `<|python_tag|>` calls, with the argument `code`."""
_MAX_DEPTH = 100
"""Maximum nesting of values, far below the limit of recursive code, here and in environments."""
_LOWEST, _BEYOND = -(2**63), 2**64
"""The range of whole numbers that a message to a worker can hold, upper end excluded."""


def _hermes(text: str) -> Found:
    calls: list[WrittenCall] = []
    for match in _HERMES.finditer(text):
        calls += _of_tags(match[1]) or _of_json(match[1])
    return _HERMES.sub("", text), calls


def _of_tags(text: str) -> list[WrittenCall]:
    """Read a call with one tag per argument; return an empty list for other forms."""
    found = _FUNCTION.match(text) or _BARE_NAME.match(text)
    if found is None:
        return []
    if found.re is _FUNCTION:
        given = (part.partition(">") for part in text.split("<parameter=")[1:])
        values = {name: value.partition("</parameter>")[0] for name, _, value in given}
    else:
        given = (part.partition("</arg_key>") for part in text.split("<arg_key>")[1:])
        rests = {name: rest.partition("<arg_value>")[2] for name, _, rest in given}
        values = {name: rest.partition("</arg_value>")[0] for name, rest in rests.items()}
    plain = {n.strip(): one.removeprefix("\n").removesuffix("\n") for n, one in values.items()}
    return [WrittenCall(text, found[1], plain, in_texts=True)]


def _llama(text: str) -> Found:
    before, tag, rest = text.partition(PYTHON_TAG)
    if not tag:
        if not text.lstrip().startswith("{"):
            return text, []
        found = list(_objects(text))
        return ("", found) if any(call.name or call.error for call in found) else (text, [])
    rest = rest.strip()
    if rest.startswith("{"):
        return before, list(_objects(rest))
    builtin = _BUILTIN.fullmatch(rest)
    if builtin is not None:
        return before, [_of_keywords(rest, builtin[1], builtin[2])]
    return before, [WrittenCall(rest, CODE_TOOL, {"code": rest})]


def _mistral(text: str) -> Found:
    before, *parts = text.split(MISTRAL_CALLS)
    calls: list[WrittenCall] = []
    for part in parts:
        named = _NAMED.match(part)
        if named is None:
            calls += _of_json(part)
            continue
        value, error = load_json(part[named.end() :])
        calls.append(WrittenCall(part, named[1], value, error, named[2] or ""))
    return before, calls


def _json(text: str) -> Found:
    fenced = _FENCED.search(text)
    whole = text if fenced is None else fenced[1]
    if not whole.lstrip().startswith(("{", "[")):
        return text, []
    calls = _of_json(whole)
    if any(not call.name and not call.error for call in calls) or not calls:
        return text, []  # an object, but not a call
    rest = "" if fenced is None else text[: fenced.start()] + text[fenced.end() :]
    return rest, calls


_READERS = {"hermes": _hermes, "llama": _llama, "mistral": _mistral, "json": _json}


def load_json(text: str) -> tuple[Any, str]:
    """Return the value of a JSON text and an error text, which is empty if it is valid."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse, parse_int=_whole)
        if _depth(value) > _MAX_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, "the JSON has half of a surrogate pair, which is not a character"
    except RecursionError:
        return None, "the JSON is nested too deeply"
    except ValueError as error:
        return None, f"this is not valid JSON: {error}"
    return value, ""


def _whole(digits: str) -> int:
    value = int(digits)
    if not _LOWEST <= value < _BEYOND:
        raise ValueError(f"the whole number {digits[:20]}... needs more than 64 bits")
    return value


def _depth(value: Any) -> int:
    depth, level = 1, [value]
    while level := [one for part in level for one in _inside(part)]:
        depth += 1
    return depth


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _of_json(text: str) -> list[WrittenCall]:
    value, error = load_json(text)
    if error:
        return [WrittenCall(text, error=error)]
    return [_call(text, one) for one in (value if isinstance(value, list) else [value])]


def _call(text: str, value: Any) -> WrittenCall:
    """Convert a JSON value to a call, without a name if it is not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return WrittenCall(text)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's messages
        inner, error = load_json(arguments)
        arguments = arguments if error else inner
    given = value.get("id")
    return WrittenCall(text, value["name"], arguments, id=given if isinstance(given, str) else "")


def _objects(text: str) -> Iterator[WrittenCall]:
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        if text[place] in "; \t\r\n":
            place += 1
            continue
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = len(text)
        yield from _of_json(text[place:end])
        place = end


def _of_keywords(text: str, name: str, arguments: str) -> WrittenCall:
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("arguments need names")
        values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        value, error = load_json(json.dumps(values))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as problem:
        return WrittenCall(text, name, error=f"the arguments cannot be read: {problem}")
    return WrittenCall(text, name, value, error)
