"""Python functions as tools: type hints and a docstring become a schema."""

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

    `function` needs a type hint for each argument; its docstring, in Google's style, describes it
    and its arguments. Raises UserError if an argument has no type hint, or one that JSON does not
    fit.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self.function = function
        summary, described = docstring_parts(inspect.getdoc(function) or "")
        self._arguments = self._model(described)
        parameters = _without_titles(self._arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        parameters.setdefault("properties", {})
        about = {"name": self.name, "description": summary, "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": about}
        """The schema in OpenAI's format, for the chat template."""

    def _model(self, described: Mapping[str, str]) -> Any:
        fields: dict[str, Any] = {}
        try:
            signature = inspect.signature(self.function, eval_str=True)
        except (NameError, TypeError, ValueError) as error:
            raise UserError(f"tool {self.name}: its type hints cannot be read: {error}") from error
        for parameter in signature.parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(
                    f"tool {self.name}: the argument {parameter.name} cannot be given by name, "
                    "as in the calls of a model"
                )
            if parameter.annotation is parameter.empty:
                raise UserError(
                    f"tool {self.name}: the argument {parameter.name} needs a type hint for its "
                    f"schema; write {parameter.name}: int, for instance"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            about = described.get(parameter.name)
            # Numbered, since pydantic's names may not begin with an underscore or hide a method.
            field = Field(default, alias=parameter.name, description=about)
            fields[f"argument_{len(fields)}"] = (parameter.annotation, field)
        try:
            return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
        except (PydanticUserError, TypeError) as error:
            first = str(error).splitlines()[0]
            raise UserError(f"tool {self.name}: its type hints fit no schema: {first}") from error

    def arguments(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the function's arguments and an error text, which is empty if they are valid."""
        try:
            values = self._arguments.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            shown = "" if first["type"] == "missing" else f", got {first['input']!r:.80}"
            return {}, f"wrong arguments for {self.name}: {place}: {first['msg']}{shown}"
        names = {field: info.alias for field, info in type(values).model_fields.items()}
        return {str(names[field]): getattr(values, field) for field in names}, ""


def result_text(value: Any) -> str:
    """Convert a tool's result to text: texts unchanged, else JSON, else `str`."""
    if isinstance(value, str):
        return value
    from pydantic_core import to_json

    return to_json(value, fallback=_plain, inf_nan_mode="constants").decode()


def _plain(value: Any) -> Any:
    """Convert arrays and their numbers to lists and numbers, other values to `str`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def docstring_parts(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring in Google's style into its description and those of the arguments."""
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
