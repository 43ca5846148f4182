"""Arguments against the schemas of strangers: what fits, and that no check takes long."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from asyncrl.environments.tool_calls import misfit, parse_turn

DEEP: dict[str, Any] = {"type": "string"}
for _ in range(3000):
    DEEP = {"not": DEEP}


def doubling(levels: int) -> dict[str, Any]:
    """A small schema that takes 2**levels checks."""
    both = [{"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(levels)]
    return {
        "$defs": {str(level): one for level, one in enumerate([*both, {"minProperties": 0}])},
        "$ref": "#/$defs/0",
    }


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 40 + "!"}),
        ({"patternProperties": {"^(a+)+$": {}}}, {"a" * 40 + "!": 1}),
        (
            {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
            {"a" * 40 + "!": 1},
        ),
        ({"propertyNames": {"pattern": "^(a+)+$"}}, {"a" * 40 + "!": 1}),
        (
            {"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#",
                                  "pattern": "^(a+)+$"}}},
            {"a": "a" * 40 + "!"},
        ),
        ({"$ref": "#"}, {}),
        ({"$ref": "https://nowhere.invalid/schema"}, {}),
        ({"$ref": 5}, {}),
        (doubling(40), {}),
        (DEEP, {}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"x": i} for i in range(3000)]}),
        (
            {"properties": {"a": {"items": {"enum": list(range(100_000))}}}},
            {"a": list(range(100_000, 103_000))},
        ),
        ({"type": 3, "properties": [], "required": 5}, {"a": 1}),
    ],
)  # fmt: skip
def test_no_schema_holds_the_generator_up(schema: Any, arguments: Any) -> None:
    began = time.process_time()
    assert misfit(arguments, schema) is None
    assert time.process_time() - began < 5, "minutes, or no end, without a bound"


def test_a_tool_whose_schema_calls_itself_is_called_all_the_same() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]
    (call,) = parse_turn('{"name": "f", "arguments": {}}', "json", tools).calls
    assert not call.error


TREE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "properties": {"a": {"anyOf": [{"$ref": "#/$defs/tree"}, {"enum": ["none"]}]}},
    "required": ["a"],
}
NODES = st.recursive(
    st.fixed_dictionaries({"value": st.integers(-1, 3)}) | st.sampled_from(["none", {}, 3]),
    lambda inner: st.fixed_dictionaries(
        {"value": st.just(1), "children": st.lists(inner, max_size=3)}
    ),
    max_leaves=8,
)


@given(arguments=st.fixed_dictionaries({}, optional={"a": NODES}))
def test_what_is_enforced_is_what_jsonschema_says(arguments: dict[str, Any]) -> None:
    right = Draft202012Validator(TREE).is_valid(arguments)
    assert (misfit(arguments, TREE) is None) == right


def test_long_arguments_and_lists_are_checked() -> None:
    """The bound is far from what tools are called with."""
    schema = {
        "properties": {
            "text": {"type": "string"},
            "rows": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        },
        "required": ["text", "rows"],
        "additionalProperties": False,
    }
    right = {"text": "x" * 100_000, "rows": list(range(100))}
    assert misfit(right, schema) is None
    assert (
        misfit({**right, "rows": [*range(99), "x"]}, schema)
        == "rows.99: 'x' is not of type 'integer'"
    )
    many = {"text": "", "rows": [*range(200), 0]}
    assert "non-unique" in str(misfit(many, schema))
