"""Formats the mistakes in a refused configuration, one line each."""

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from asyncrl.config.former import refusal
from asyncrl.suggestions import nearest, shortened, written

MAX_LINES = 20
_SHOWN = 80
_MESSAGES = {
    "model_type": "must be a mapping of settings (lines of `key: value`)",
    "dict_type": "must be a mapping (lines of `key: value`)",
    "tuple_type": "must be a list, such as [a, b]",
    "string_type": "must be text; write it in quotes",
    "invalid_key": "keys must be text; write them in quotes",
    "missing": "is missing",
    "finite_number": "must be a finite number",
}
_OUT_OF_BOUNDS = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("finite_number", "string_pattern_mismatch", "union"),
)
_Location = tuple[int | str, ...]


def mistakes(
    values: Mapping[str, Any], error: ValidationError | None, model: type[BaseModel]
) -> list[str]:
    """Return at most `MAX_LINES` lines, one for each mistake, and one that counts the rest."""
    # Pydantic reads true and false as 1 and 0 where a number belongs.
    booleans = dict(_booleans(values, model, ()))
    found = [] if error is None else error.errors(include_url=False)
    details = _one_each(found, values)
    places = {*booleans, *(detail["loc"] for detail in details)}
    lines = [
        _explain(detail, model)
        for detail in details
        # A list whose only entry is refused is also reported as too short, which is redundant.
        if not detail["loc"] or not any(_inside(place, detail["loc"]) for place in places)
    ]
    lines += [
        f"{_path(location)}: must be a number; YAML reads yes, on and true as true, and no, off "
        f"and false as false (given: {str(value).lower()})"
        for location, value in booleans.items()
    ]
    more = len(lines) - MAX_LINES
    return lines if more <= 0 else [*lines[:MAX_LINES], f"and {more:,} more"]


def _one_each(details: Sequence[ErrorDetails], values: Mapping[str, Any]) -> list[ErrorDetails]:
    """Join the errors of a value that fits none of several types, which end in a type's name."""
    joined: dict[_Location, ErrorDetails] = {}
    for one in details:
        place = one["loc"]
        if _is_type_of(one, values):
            place = place[:-1]
            words = (_MESSAGES.get(one["type"]) or _reworded(one["msg"])).partition(", unable")[0]
            if place in joined:
                words = f"{joined[place]['msg']}, or {words.removeprefix('must be ')}"
            one = {**one, "loc": place, "type": "union", "msg": words}
        joined[place] = one
    return list(joined.values())


def _is_type_of(detail: ErrorDetails, values: Mapping[str, Any]) -> bool:
    """Return True if the last part of an error's location is none of the user's."""
    found: Any = values
    for part in detail["loc"][:-1]:
        try:
            found = found[part]
        except (LookupError, TypeError):
            return False
    is_key = isinstance(found, Mapping) or detail["type"] == "missing"
    return found is detail["input"] and not is_key


def _inside(place: _Location, outer: _Location) -> bool:
    return len(place) > len(outer) and place[: len(outer)] == outer


def _explain(detail: ErrorDetails, model: type[BaseModel]) -> str:
    location, kind = detail["loc"], detail["type"]
    path = _path(location) or "the configuration"
    if kind == "extra_forbidden":
        former = refusal(path)
        if former is not None:
            return f"{path} {former}"
        names = _field_names(model, location[:-1])
        near = nearest(str(location[-1]), names)
        more = " `asyncrl run --explain` shows all." if near.startswith(" None of") else ""
        return f"{path}: there is no such key.{near}{more}"
    message = _MESSAGES.get(kind) or _reworded(detail["msg"])
    if kind == "too_long" or kind == "too_short":
        bound = "most {max_length}" if kind == "too_long" else "least {min_length}"
        message = f"must have at {bound.format(**detail['ctx'])} entries"
    given = detail["input"]
    hide = kind == "missing" or isinstance(given, dict | BaseModel)
    line = f"{path}: {message}" + ("" if hide else f" (given: {_shown(given)})")
    if kind in _OUT_OF_BOUNDS:
        meaning = _meaning(model, location)
        line += f". {meaning}." if meaning else ""
    return line


def _reworded(message: str) -> str:
    bare = message.removeprefix("Value error, ")
    for before, after in (("Input should be ", "must be "), ("String should ", "must ")):
        bare = bare.replace(before, after, 1)
    return bare


def _path(location: _Location) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + shortened(part, _SHOWN)
    return path


def _shown(value: Any) -> str:
    """Format a value with bounded length, even if repr is long or impossible."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return f"a number of about {int(value.bit_length() * math.log10(2)):,} digits"
    if isinstance(value, list | tuple):
        shown = ", ".join(_shown(inner) for inner in value[:8])
        return shortened(f"[{shown}{', ...' if len(value) > 8 else ''}]", _SHOWN)
    if isinstance(value, dict):
        return "a mapping"
    return shortened(str(value), _SHOWN) if isinstance(value, float) else written(value, _SHOWN)


def _booleans(
    values: Mapping[str, Any], model: type[BaseModel], outer: _Location
) -> Iterator[tuple[_Location, bool]]:
    for name, field in model.model_fields.items():
        value = values.get(name)
        if isinstance(value, bool) and _takes_numbers(field.annotation):
            yield (*outer, name), value
        inner = _model_in(field.annotation)
        if isinstance(value, Mapping) and inner is not None:
            if _is_named(field.annotation):
                for key, entry in value.items():
                    if isinstance(entry, Mapping):
                        yield from _booleans(entry, inner, (*outer, name, str(key)))
            else:
                yield from _booleans(value, inner, (*outer, name))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for index, entry in enumerate(value):
                if isinstance(entry, Mapping) and inner is not None:
                    yield from _booleans(entry, inner, (*outer, name, index))
                elif isinstance(entry, bool) and any(
                    map(_takes_numbers, typing.get_args(field.annotation))
                ):
                    yield (*outer, name, index), entry


def _takes_numbers(annotation: Any) -> bool:
    """Return True for a number type, possibly optional or annotated, that excludes booleans."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        choices = typing.get_args(annotation)
        return bool not in choices and any(map(_takes_numbers, choices))
    return annotation in (int, float)


def _field(model: type[BaseModel], location: _Location) -> FieldInfo | None:
    """Return the field at this place; for an entry of a list or mapping, that of the container."""
    current: type[BaseModel] | None = model
    field = None
    is_name = False
    for part in location:
        if isinstance(part, int) or is_name:
            is_name = False
            continue
        field = None if current is None else current.model_fields.get(part)
        if field is None:
            return None
        current = _model_in(field.annotation)
        is_name = _is_named(field.annotation)
    return field


def _field_names(model: type[BaseModel], location: _Location) -> list[str]:
    if not location:
        return list(model.model_fields)
    field = _field(model, location)
    inner = None if field is None else _model_in(field.annotation)
    return [] if inner is None else list(inner.model_fields)


def _meaning(model: type[BaseModel], location: _Location) -> str:
    field = _field(model, location)
    text = " ".join(((field and field.description) or "").split())
    return shortened(text.partition(". ")[0].rstrip("."), 200)


def _is_named(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict and _model_in(annotation) is not None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model inside `X`, `X | None` or `tuple[X, ...]`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
