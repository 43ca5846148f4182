"""Calls of tools are read in each model's form; wrong ones become messages to the model."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from chat_models import FAMILIES, chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.environments.tool_calls import parse_turn
from asyncrl.environments.tool_formats import ToolFormat, format_of_template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "brave_search", "parameters": {}}},
]
FORMS = [form for form in get_args(ToolFormat) if form != "auto"]
ADD = {"name": "add", "arguments": {"a": 1}}

RIGHT = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ADD], ""),
    ("hermes", 'well <tool_call>{"name": "add", "arguments": {"a": 1}}', [ADD], "well"),
    ("hermes", '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>', [ADD], ""),
    (
        "hermes",
        (
            '<think>\n<tool_call>{"name": "no"}</tool_call>\n</think>\n\n'
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        ),
        [ADD, ADD],
        '<think>\n<tool_call>{"name": "no"}</tool_call>\n</think>',
    ),
    ("hermes", '<think><tool_call>{"name": "add"}</tool_call>', [], None),
    (
        "hermes",
        (
            "so <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
            "<parameter=b>\n2\n\n</parameter>\n</function>\n</tool_call>"
        ),
        [{"name": "add", "arguments": {"a": 1, "b": "2\n"}}],
        "so",
    ),
    (
        "hermes",
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>two</arg_value>\n</tool_call>"
            "<tool_call>brave_search\n</tool_call>"
        ),
        [
            {"name": "add", "arguments": {"a": 1, "b": "two"}},
            {"name": "brave_search", "arguments": {}},
        ],
        "",
    ),
    ("hermes", '{"name": "add", "arguments": {"a": 1}}', [], None),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', [ADD], ""),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD], ""),
    (
        "llama",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
        [ADD, ADD],
        "",
    ),
    (
        "llama",
        '<|python_tag|>brave_search.call(query="a (b)")',
        [{"name": "brave_search", "arguments": {"query": "a (b)"}}],
        "",
    ),
    ("llama", "the sum is 2", [], None),
    ("llama", '{"a": 1}', [], None),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [ADD], ""),
    ("mistral", 'so[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', [ADD, ADD], "so"),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', [ADD], ""),
    ("json", '{"name": "add", "arguments": {"a": 1}}', [ADD], ""),
    ("json", 'so:\n```json\n{"name": "add", "arguments": {"a": 1}}\n```', [ADD], "so:"),
    ("json", '{"answer": 1}', [], None),
    ("json", "[1, 2]", [], None),
]


@pytest.mark.parametrize(("form", "text", "calls", "content"), RIGHT)
def test_calls_are_read(form: Any, text: str, calls: list[Any], content: str | None) -> None:
    turn = parse_turn(text, form, TOOLS)
    assert [{"name": c.name, "arguments": c.arguments} for c in turn.calls] == calls
    assert all(call.error == "" for call in turn.calls)
    assert turn.content == (text if content is None else content)
    assert len(turn.message.get("tool_calls", [])) == len(calls)


WRONG = [
    ("hermes", '<tool_call>{"name": "add", </tool_call>', "json", "not valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "json", "NaN"),
    ("hermes", "<tool_call>[]</tool_call> <tool_call>3</tool_call>", "json", "is an object with"),
    (
        "hermes",
        '<tool_call>{"name": "ad", "arguments": {}}</tool_call>',
        "unknown_tool",
        "no tool 'ad', there are: add, brave_search; did you mean add?",
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "1"}}</tool_call>',
        "arguments",
        "a: '1' is not of type 'integer'",
    ),
    (
        "hermes",
        "<tool_call>add<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>",
        "arguments",
        "a: 'x' is not of type 'integer'",
    ),
    ("hermes", "<tool_call>\n<function=ad>", "unknown_tool", "did you mean add?"),
    ("llama", '{"name": "add", "parameters": {}}', "arguments", "'a' is a required property"),
    ("llama", '{"name": "add", "parameters": {"a": 1}', "json", "not valid JSON"),
    ("llama", "<|python_tag|>brave_search.call(x)", "json", "arguments need names"),
    ("llama", "<|python_tag|>import os", "unknown_tool", "code_interpreter"),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "c": 2}}]',
        "arguments",
        "unknown argument 'c'; it takes a, b",
    ),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "json", "not valid JSON"),
    ("json", '{"name": "add", "arguments": [1]}', "arguments", "must be an object"),
    ("json", '{"name": "add", "arguments": {"b": "\\ud800"}}', "json", "surrogate"),
    ("json", '{"name": "add", "arguments": {"a": 1%s}}' % (30 * "0"), "json", "64 bits"),
    ("json", '{"name": "add", "arguments": {"a": %s}}' % (200 * "[" + 200 * "]"), "json", "deeply"),
]


@pytest.mark.parametrize(("form", "text", "kind", "message"), WRONG)
def test_wrong_calls_tell_the_model_what_is_wrong(
    form: Any, text: str, kind: str, message: str
) -> None:
    turn = parse_turn(text, form, TOOLS)
    (call,) = turn.calls
    assert call.error_kind == kind
    assert message in call.error
    assert len(call.id) == 9
    assert call.as_dict()["error"] == call.error
    assert ("tool_calls" in turn.message) == (kind != "json")


def test_ids_are_the_same_for_the_same_turn_and_differ_between_turns() -> None:
    text = RIGHT[3][1]
    first, again, later = (parse_turn(text, "hermes", TOOLS, turn=turn) for turn in (0, 0, 1))
    assert first == again
    ids = [call.id for call in (*first.calls, *later.calls)]
    assert len(set(ids)) == 4


def test_without_tools_no_call_is_looked_for() -> None:
    text = RIGHT[0][1]
    assert parse_turn(text, "hermes", []).message == {"role": "assistant", "content": text}


def test_the_form_is_that_of_the_chat_template() -> None:
    found = {name: format_of_template(chat_tokenizer(name).chat_template) for name in FAMILIES}
    assert found == {
        "qwen3": "hermes",
        "llama31": "llama",
        "mistral_v3": "mistral",
        "mistral_tekken": "mistral",
        "custom": "json",
        "plain": "json",
    }
    assert format_of_template({"default": "", "tool_use": "<tool_call>"}) == "hermes"


PIECES = st.one_of(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]",
            "[ARGS]", "[CALL_ID]", '{"name": "add", "arguments": ', '{"a": 1}', "}", "]", "[", '"',
            "```json\n", "```", "add", ".call(", ")", "**a", "a=1", ";", "9" * 5000, "[" * 3000,
            '"\\udc00"', "NaN", '{"name": 1}', '{"name": "add", "parameters": "{}"}', "\x00",
        ]
    ),
    st.text(max_size=8),
)  # fmt: skip


@given(
    text=st.lists(PIECES, max_size=12).map("".join),
    form=st.sampled_from(FORMS),
    tools=st.sampled_from(
        [TOOLS, [{}], [{"function": 3}], [{"name": "add", "parameters": {"type": 3}}]]
    ),
)
def test_no_text_raises(text: str, form: Any, tools: Any) -> None:
    turn = parse_turn(text, form, tools)
    for call in turn.calls:
        assert call.error or call.name
        assert len(call.error) < 600
    # Everything can be sent on, and comes back as it is.
    sent = json.dumps([turn.message, *(call.as_dict() for call in turn.calls)])
    assert json.loads(sent)[0]["role"] == "assistant"


NAMES = st.text("abc_", min_size=1, max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(arguments=st.dictionaries(NAMES, VALUES, max_size=3), form=st.sampled_from(FORMS))
def test_what_is_written_is_read(arguments: dict[str, Any], form: Any) -> None:
    tools = [{"name": "add", "parameters": {"type": "object"}}]
    written = json.dumps({"name": "add", "arguments": arguments})
    text = {
        "hermes": f"<tool_call>\n{written}\n</tool_call>",
        "llama": written.replace('"arguments"', '"parameters"', 1),
        "mistral": f"[TOOL_CALLS] [{written}]",
        "json": written,
    }[form]
    if "</tool_call>" in json.dumps(arguments) or "</think>" in text:
        return
    (call,) = parse_turn(text, form, tools).calls
    assert (call.name, call.arguments, call.error) == ("add", arguments, "")


def test_a_fence_that_is_never_closed_is_read_in_one_pass() -> None:
    """A search that backtracks takes the square of its length: hours here."""
    assert not parse_turn("```" + "\n" * 1_000_000, "json", TOOLS).calls
    parse_turn("<tool_call><function=add>" + "<parameter=a>" * 100_000, "hermes", TOOLS)
