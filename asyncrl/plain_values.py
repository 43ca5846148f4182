"""Arguments of a user's functions, restricted to values that JSON holds exactly.

They travel to processes as JSON and are written to config.yaml. Other values would arrive changed,
so they are refused when the configuration is read.
"""

import math
from typing import Annotated, Any

from pydantic import AfterValidator

from asyncrl.suggestions import shortened

_LARGEST = 2**63
"""Integers of at least this size are not read back everywhere."""


def plain(value: Any, name: str) -> Any:
    """Return the value as None, bool, int, float, str, list and dict; a tuple becomes a list.

    Raises ValueError for anything that JSON cannot hold; `name` and the place are in the message.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, int) and -_LARGEST <= value < _LARGEST:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [plain(one, f"{name}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, name): plain(one, f"{name}.{key}") for key, one in value.items()}
    raise ValueError(
        f"{shortened(name)} is {shortened(repr(value), 60)}, which JSON cannot hold, so the "
        "function would be called with something else; give a text, a finite number below 2^63, "
        "true, false, null, or lists and mappings of these"
    )


def _key(key: Any, name: str) -> str:
    if isinstance(key, str):
        return str(_text(key, f"a key of {name}"))
    raise ValueError(
        f"{shortened(name)} has the key {shortened(repr(key), 60)}; keys are texts, as in "
        f"{shortened(repr(str(key)), 60)}"
    )


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{shortened(name)} has half a character (a lone surrogate) at {error.start}, which a "
            "file cannot hold; remove it"
        ) from error
    return str(value)


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    return {name: plain(value, name) for name, value in values.items()}


Arguments = Annotated[dict[str, Any], AfterValidator(_arguments)]
"""Keyword arguments of a user's function or class, by name."""
