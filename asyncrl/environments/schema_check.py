"""Compares the arguments of a tool's call with the tool's JSON schema, in bounded time. Pure.

Schemas come from agents and servers, arguments from the policy, and the check runs in the
generator's event loop, where all samples wait for it. So it is bounded by an amount of work, which
is the same whenever the same call is checked. Not enforced:

- `pattern`, `patternProperties` and `unevaluated...`: a regular expression can take for ever;
- `format`, as JSON Schema has it by default;
- `$ref` to anything but a place in the schema itself (`#/$defs/...`), and `$dynamicRef`;
- a schema that is wrong, calls itself without an end, or takes more work than the bound: nothing of
  it is enforced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

_MAX_WORK = 20_000
"""Of a check, in units of about 10 µs: a keyword that is looked at, or ten values of it."""
_VALUES, _CHARACTERS = 10, 10_000
"""So many values of a keyword cost as much as a keyword; so many characters of the arguments make
each keyword as expensive as two."""
_UNBOUNDED = (
    *("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties"),
    "$dynamicRef",
)

Keyword = Callable[[Any, Any, Any, Any], Any]
"""Of jsonschema: validator, the keyword's value, instance, schema."""


class _TooMuchError(Exception):
    """The work is used up."""


class _Check:
    """One check.

    Args:
        schema: the whole of it.
        characters: of the arguments.
    """

    def __init__(self, schema: Mapping[str, Any], characters: int) -> None:
        self.schema = schema
        self._left = float(_MAX_WORK)
        self._factor = 1 + characters / _CHARACTERS

    def charge(self, values: int) -> None:
        """Raises _TooMuchError."""
        self._left -= (1 + values / _VALUES) * self._factor
        if self._left < 0:
            raise _TooMuchError


_CHECK: ContextVar[_Check] = ContextVar("check")


def misfit(arguments: dict[str, Any], schema: Mapping[str, Any]) -> str | None:
    """What does not fit; None if all fits, or the schema cannot be used.

    Example:
        >>> misfit({"a": "x"}, {"properties": {"a": {"type": "integer"}}})
        "a: 'x' is not of type 'integer'"
        >>> misfit({}, {"$ref": "#"}) is None
        True
    """
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
    """A class of jsonschema whose keywords count their work."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import create

    own = {"$ref": _ref, "additionalProperties": _without_patterns, "uniqueItems": _unique}
    keywords = {
        name: _counted(own.get(name, keyword))
        for name, keyword in Draft202012Validator.VALIDATORS.items()
        if name not in _UNBOUNDED
    }
    return create(
        Draft202012Validator.META_SCHEMA,
        validators=keywords,
        type_checker=Draft202012Validator.TYPE_CHECKER,
    )


def _without_names(schema: Any) -> Any:
    """A schema without `$schema` and `$id`.

    With them, jsonschema takes other keywords than ours, and looks for places in the whole of it.
    """
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
    """Only into the schema itself: other places may be far, and take a search."""
    if not ref.startswith("#"):
        raise ValueError(ref)
    target: Any = _CHECK.get().schema
    for part in unquote(ref[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target[int(key)] if isinstance(target, list) else target[key]
    yield from validator.descend(instance, target)


def _without_patterns(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Which properties are additional depends on the patterns, if there are any."""
    from jsonschema import Draft202012Validator

    if not schema.get("patternProperties"):
        keyword = Draft202012Validator.VALIDATORS["additionalProperties"]
        yield from keyword(validator, value, instance, schema) or ()


def _unique(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """It may compare each item with each other one."""
    from jsonschema import Draft202012Validator

    if isinstance(instance, list):
        _CHECK.get().charge(len(instance) ** 2 // 2)
        keyword = Draft202012Validator.VALIDATORS["uniqueItems"]
        yield from keyword(validator, value, instance, schema) or ()
