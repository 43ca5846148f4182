"""Python functions as tools: type hints and a docstring become a schema, and calls are made.

Example:
    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: the first number.
    ...     '''
    ...     return a + b
    >>> tool = FunctionTool(add)
    >>> tool.schema["function"]["parameters"]["properties"]["a"]
    {'description': 'the first number.', 'type': 'integer'}
    >>> tool.call({"a": 1})
    '2'
    >>> tool.call({"a": [1]})
    'error: wrong arguments for add: a: Input should be a valid integer, got [1]'
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model

from asyncrl.errors import UserError

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example)s?:\s*$")
_ARGUMENT = re.compile(r"^(\s*)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


class FunctionTool:
    """A function that the model may call.

    Args:
        function: has a type hint for each argument; its docstring, in Google's style, describes it
            and its arguments.
        name: that the model calls it by; None: the function's.

    Raises:
        UserError: an argument has no type hint, or one that no JSON fits.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        """That the model calls it by."""
        self.function = function
        """What is called."""
        summary, described = docstring_parts(inspect.getdoc(function) or "")
        self._arguments = self._model(described)
        parameters = _without_titles(self._arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": summary,
                "parameters": {**parameters, "properties": parameters.get("properties", {})},
            },
        }
        """For the chat template, in the form that OpenAI's messages have."""

    def _model(self, described: Mapping[str, str]) -> Any:
        fields: dict[str, Any] = {}
        try:
            signature = inspect.signature(self.function, eval_str=True)
        except (NameError, TypeError, ValueError) as error:
            raise UserError(f"tool {self.name}: its type hints cannot be read: {error}") from error
        for parameter in signature.parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(
                    f"tool {self.name}: the argument {parameter.name} has no name in a call; "
                    "a model calls with named arguments only"
                )
            if parameter.annotation is parameter.empty:
                raise UserError(
                    f"tool {self.name}: the argument {parameter.name} has no type hint, so there "
                    f"is no schema; write {parameter.name}: int, for instance"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            about = described.get(parameter.name)
            # Names of fields may not begin with an underscore or hide a method: numbered ones may.
            field = Field(default, alias=parameter.name, description=about)
            fields[f"argument_{len(fields)}"] = (parameter.annotation, field)
        try:
            return create_model(
                self.name,
                __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False),
                **fields,
            )
        except (PydanticUserError, TypeError) as error:
            first = str(error).splitlines()[0]
            raise UserError(f"tool {self.name}: no schema fits its type hints: {first}") from error

    def arguments(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments as the function takes them, and what is wrong: empty if nothing is."""
        try:
            values = self._arguments.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            shown = "" if first["type"] == "missing" else f", got {first['input']!r:.80}"
            return {}, f"wrong arguments for {self.name}: {place}: {first['msg']}{shown}"
        names = {field: info.alias for field, info in type(values).model_fields.items()}
        return {str(names[field]): getattr(values, field) for field in names}, ""

    def call(self, given: Mapping[str, Any]) -> str:
        """The result as the model reads it; wrong arguments give a message. Exceptions pass.

        A text stays as it is; everything else becomes JSON.
        """
        arguments, wrong = self.arguments(given)
        return f"error: {wrong}" if wrong else result_text(self.function(**arguments))


def result_text(value: Any) -> str:
    """What a tool returned, as a text: texts as they are, else JSON, else as it is printed."""
    if isinstance(value, str):
        return value
    from pydantic_core import to_json

    return to_json(value, fallback=_plain, inf_nan_mode="constants").decode()


def _plain(value: Any) -> Any:
    """Arrays and their numbers as lists and numbers, anything else as it is printed."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def docstring_parts(doc: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring of Google's style, and those of its arguments."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, name, indent = "", "", -1
    for line in doc.splitlines():
        header = _SECTION.match(line)
        if header is not None:
            section, name = header[1], ""
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            found = _ARGUMENT.match(line)
            if found is not None and (not name or len(found[1]) <= indent):
                name, indent = found[2], len(found[1])
                described[name] = found[3].strip()
            elif name and line.strip():
                described[name] = f"{described[name]} {line.strip()}".strip()
    return "\n".join(summary).strip(), described


def _without_titles(schema: Any) -> Any:
    """Without pydantic's titles, which are our numbered names."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(one) for name, one in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
