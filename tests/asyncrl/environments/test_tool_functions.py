"""Functions with type hints and docstrings become schemas that templates know."""

from __future__ import annotations

import datetime as dt
import enum
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional

import numpy as np
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from asyncrl.environments.tool_functions import FunctionTool, docstring_parts, result_text
from asyncrl.errors import UserError


def called(tool: FunctionTool, given: dict[str, Any]) -> str:
    arguments, wrong = tool.arguments(given)
    return f"error: {wrong}" if wrong else result_text(tool.function(**arguments))


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Place:
    x: float
    y: float = 0.0


def measure(
    place: Place, unit: Unit, names: list[str], schema: int | None = None, *, _k: bool = True
) -> dict[str, Any]:
    """Measure a place.

    In two dimensions.

    Args:
        place: where it is,
            as a point.
        unit (Unit): of the result.
        names: each: a name.

    Returns:
        Args: no argument.
    """
    assert isinstance(place, Place)
    assert isinstance(unit, Unit)
    return {"x": place.x, "unit": unit, "names": names, "schema": schema, "k": _k}


def test_a_schema_has_types_descriptions_and_defaults() -> None:
    function = FunctionTool(measure).schema["function"]
    assert function["name"] == "measure"
    assert function["description"] == "Measure a place.\n\nIn two dimensions."
    parameters = function["parameters"]
    assert parameters["required"] == ["place", "unit", "names"]
    assert parameters["properties"]["names"] == {
        "type": "array",
        "items": {"type": "string"},
        "description": "each: a name.",
    }
    assert parameters["properties"]["place"]["description"] == "where it is, as a point."
    assert parameters["properties"]["_k"] == {"type": "boolean", "default": True}
    assert parameters["$defs"]["Unit"] == {"enum": ["m", "ft"], "type": "string"}
    assert "title" not in repr(parameters)


def test_simple_functions_have_the_schema_of_transformers() -> None:
    from transformers.utils import get_json_schema

    def add(a: int, b: list[float], c: Literal["x", "y"] = "x") -> str:
        """Add.

        Args:
            a: one.
            b: two.
            c: three.
        """
        return ""

    ours, theirs = FunctionTool(add).schema, get_json_schema(add)
    theirs["function"].pop("return", None)
    properties = ours["function"]["parameters"]["properties"]
    assert properties["c"].pop("default") == "x"
    assert ours == theirs


def test_a_call_converts_arguments_and_the_result() -> None:
    tool = FunctionTool(measure)
    given = {"place": {"x": 1}, "unit": "ft", "names": ["a"]}
    assert called(tool, given) == '{"x":1.0,"unit":"ft","names":["a"],"schema":null,"k":true}'
    assert called(tool, given | {"place": 3}).startswith(
        "error: wrong arguments for measure: place: "
    )
    assert called(tool, {}) == "error: wrong arguments for measure: place: Field required"
    assert "z: Extra inputs are not permitted" in called(tool, given | {"z": 1})


def test_functions_that_no_schema_fits_are_refused() -> None:
    def untyped(a): ...  # type: ignore[no-untyped-def]

    def positional(*args: int) -> None: ...

    def odd(a: object()) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(UserError, match="the argument a needs a type hint"):
        FunctionTool(untyped)
    with pytest.raises(UserError, match="args cannot be given by name"):
        FunctionTool(positional)
    with pytest.raises(UserError, match="tool odd"):
        FunctionTool(odd)


def test_results_are_texts() -> None:
    assert result_text("as it is") == "as it is"
    assert result_text(float("nan")) == "NaN"
    assert result_text(object()).startswith('"<object')
    assert docstring_parts("") == ("", {})


class Address(BaseModel):
    street: str
    number: int = Field(1, ge=1, description="of the house")


class Options(TypedDict, total=False):
    deep: bool


@dataclass
class Basket:
    items: list[str] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)


def everything(
    address: Address,
    mode: Literal["fast", 2],
    limit: Annotated[int, Field(le=9)],
    basket: Basket = Basket(),  # noqa: B008 - a default that a user may write
    pair: tuple[int, str] = (1, "a"),
    day: Optional[dt.date] = None,  # noqa: UP045 - as many still write it
    number: float | str = 0.5,
    options: Options | None = None,
    anything: Any = None,
    unit: Unit = Unit.FOOT,
    names: list[dict[str, list[int]]] = [],  # noqa: B006
) -> Any:
    """Takes what a user may write."""
    names.append({"n": [limit]})
    seen = (address, mode, basket, pair, day, number, options, anything, unit, names)
    return [*seen, np.int64(3), np.arange(2), np.float32(0.5), {"b"}, float("inf")]


def test_hints_of_all_kinds_are_read_and_defaults_stay_as_they_are() -> None:
    tool = FunctionTool(everything)
    parameters = tool.schema["function"]["parameters"]
    assert parameters["required"] == ["address", "mode", "limit"]
    assert parameters["properties"]["mode"]["enum"] == ["fast", 2]
    assert parameters["properties"]["limit"]["maximum"] == 9
    assert parameters["$defs"]["Address"]["properties"]["number"]["description"] == "of the house"
    given = {"address": {"street": "Elm"}, "mode": 2, "limit": "3", "day": "2026-11-24"}
    wanted = [
        {"street": "Elm", "number": 1}, 2, {"items": [], "of": {}}, [1, "a"], "2026-11-24", 0.5,
        None, None, "ft", [{"n": [3]}], 3, [0, 1], 0.5, ["b"],
    ]  # fmt: skip
    for _ in "ab":  # a default that is changed is the call's own
        text = called(tool, given)
        assert json.loads(text)[:-1] == wanted
        assert text.endswith(",Infinity]")
    for wrong, place in (
        ({"address": {"street": 3}}, "address.street"),
        ({"mode": "slow"}, "mode"),
        ({"limit": 10}, "limit"),
        ({"names": [{"n": ["x"]}]}, "names.0.n.0"),
        ({"day": "yesterday"}, "day"),
    ):
        assert f"everything: {place}" in called(tool, given | wrong)


def test_a_function_behind_a_decorator_keeps_its_hints() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    assert FunctionTool(logged(measure)).schema == FunctionTool(measure).schema
