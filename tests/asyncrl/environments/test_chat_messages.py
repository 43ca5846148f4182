"""What clients send back is the conversation that it was, and what differs is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_agents import QUESTION, TOOLS, client_of, play

from asyncrl.environments.agents.openai_messages import PolicySettings, read_call
from asyncrl.environments.agents.sessions import ClientSettings
from asyncrl.environments.chat_messages import (
    RefusedCallError,
    chat_message,
    mean_the_same,
    new_messages,
)
from asyncrl.environments.tool_calls import parse_turn

ARGUMENTS = {"a": 1, "b": [True, None, "é"]}
THOUGHT = "<think>\nhm, 1 + 1\n</think>\n\nit is 2"


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calling(arguments: Any, *, name: str = "add", number: str = "abc", **more: Any) -> Any:
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
    return said("", tool_calls=[call], **more)


SAME = [
    (said("so"), said([{"type": "text", "text": "s"}, {"type": "text", "text": "o"}])),
    (said("so"), said("so", refusal=None, function_call=None, audio=None, tool_calls=None)),
    (said("so"), said("so", tool_calls=[], annotations=[], reasoning_content=None)),
    (said("so"), said("so", name="solver")),
    (said(""), said(None)),
    (said(THOUGHT), said("it is 2", reasoning_content="hm, 1 + 1\n")),
    (said(THOUGHT), said("\n\nit is 2", reasoning="\nhm, 1 + 1\n")),
    (said(THOUGHT), said(THOUGHT, reasoning_content="hm, 1 + 1")),
    (said(THOUGHT.removeprefix("<think>\n")), said("it is 2", reasoning_content="hm, 1 + 1")),
    (said("<think>\n\n</think>\n\nso"), said("<think></think>so", reasoning_content="")),
    (calling(ARGUMENTS), calling(json.dumps(ARGUMENTS))),
    (calling(ARGUMENTS), calling(json.dumps(ARGUMENTS, separators=(",", ":")))),
    (calling(ARGUMENTS), calling('{"b": [true, null, "\\u00e9"],\n "a": 1.0}')),
    (calling({}), calling("")),
    (calling({"a": 1}), {**calling('{"a":1}'), "content": None}),
    (calling("no JSON"), calling("no JSON")),
    ({"role": "developer", "content": "brief"}, {"role": "system", "content": "brief"}),
    ({"role": "tool", "content": "2", "tool_call_id": "a"}, {
        "role": "tool", "content": [{"text": "2"}], "tool_call_id": "a", "name": None}),
]  # fmt: skip

DIFFERENT = [
    (said("so"), {"role": "user", "content": "so"}),
    (said("so"), said("so ")),
    (said("so"), said("s o")),
    (said("so"), said(["so"])),
    (said("so"), calling({})),
    (said("so", name="solver"), said("so", name="critic")),
    ({"role": "user", "content": "so", "name": "Ann"}, {"role": "user", "content": "so"}),
    (said(THOUGHT), said("it is 2")),
    (said(THOUGHT), said("it is 2", reasoning_content="hm, 1 + 2")),
    (said(THOUGHT), said(THOUGHT, reasoning_content="something else")),
    (said(THOUGHT), said("it is 3", reasoning_content="hm, 1 + 1")),
    (said("a b"), said("b", reasoning_content="a")),
    (calling({"a": 1}), calling({"a": 2})),
    (calling({"a": 1}), calling({"a": True})),
    (calling({"a": 0}), calling('{"a": false}')),
    (calling({"a": 1}), calling({"a": "1"})),
    (calling({"a": 1}), calling({"a": 1, "b": None})),
    (calling({"a": [1, 2]}), calling({"a": [2, 1]})),
    (calling({"a": [1]}), calling({"a": [1, 1]})),
    (calling({"a": 1}), calling({"a": 1}, name="sub")),
    (calling({"a": 1}), calling({"a": 1}, number="other")),
    (calling({"a": 1}), said("", tool_calls=2 * calling({"a": 1})["tool_calls"])),
    (calling({}), said("", tool_calls={"a": 1})),
    (calling("{"), calling("{ ")),
    (said([{"type": "image_url", "url": "a"}]), said([{"type": "image_url", "url": "b"}])),
    ({"role": "tool", "content": "2", "tool_call_id": "a"},
     {"role": "tool", "content": "2", "tool_call_id": "b"}),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_another_form_is_the_same_message(one: Any, other: Any) -> None:
    assert mean_the_same(one, other)
    assert mean_the_same(other, one)
    assert mean_the_same(chat_message(one), chat_message(other))
    after = {"role": "user", "content": "more"}
    assert new_messages([QUESTION, one], [QUESTION, other, after]) == [after]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_differs_is_another_message(one: Any, other: Any) -> None:
    assert not mean_the_same(one, other)
    assert not mean_the_same(other, one)
    assert mean_the_same(one, json.loads(json.dumps(one)))
    assert new_messages([QUESTION, one], [QUESTION, other, QUESTION]) is None


KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)  # fmt: skip


@given(st.dictionaries(KEYS, JSON, max_size=3))
def test_arguments_may_be_written_by_any_writer_of_json(arguments: dict[str, Any]) -> None:
    written = json.dumps(arguments, sort_keys=True, indent=1, ensure_ascii=False)
    assert mean_the_same(calling(arguments), calling(written))
    assert not mean_the_same(calling(arguments), calling({**arguments, "long": 1}))


def test_arguments_as_deep_as_a_parser_takes_are_compared() -> None:
    deep = '{"a":' * 900 + "1" + "}" * 900
    assert mean_the_same(calling(deep), calling(deep.replace(":", ": ")))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (said(None, function_call={"name": "add", "arguments": "{}"}), "use `tool_calls`"),
        (said(None, audio={"id": "x"}), "audio, which is not supported"),
        (said("", tool_calls=[{"id": "1", "type": "custom"}]), "a function with a name"),
        (said("", tool_calls={"id": "1"}), "a function with a name"),
    ],
)
def test_what_no_template_shows_is_refused(message: Any, sentence: str) -> None:
    with pytest.raises(RefusedCallError, match=sentence):
        chat_message(message)


def test_whatever_form_a_client_sends_turns_back_in_the_conversation_goes_on() -> None:
    """The forms of `openai`'s messages, and those of programs that keep their own."""

    def rewritten(message: Any) -> dict[str, Any]:
        dumped: dict[str, Any] = message.model_dump()
        for call in dumped["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            backwards = dict(reversed(arguments.items()))
            call["function"]["arguments"] = json.dumps(backwards, separators=(",", ":"))
        return {**dumped, "content": [{"type": "text", "text": dumped["content"]}], "name": "me"}

    forms: list[Callable[[Any], Any]] = [
        lambda message: message,
        lambda message: message.model_dump(),
        lambda message: message.model_dump(exclude_none=True),
        lambda message: json.loads(message.to_json()),
        rewritten,
    ]

    def agent(row: Any, settings: ClientSettings) -> None:
        with client_of(settings) as client:
            messages: list[Any] = [QUESTION]
            for form in forms:
                chat = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
                reply = chat.choices[0].message
                messages.append(form(reply))
                (call,) = reply.tool_calls
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})

    text = '<think>\nhm\n</think>\n\nso <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}'
    _, *said, end = play(agent, [f"{text}</tool_call>"] * len(forms))
    assert [one.new_conversation for one in said] == [False] * (len(forms) - 1)
    assert [len(one.observation) for one in said] == [1] * (len(forms) - 1)
    assert end.done


RECORDED = json.loads((Path(__file__).parents[2] / "support/recorded_requests.json").read_text())
"""What frameworks sent when the policy took these turns (docs/environments.md)."""


@pytest.mark.parametrize("framework", RECORDED)
def test_what_frameworks_send_is_read_as_they_mean_it(framework: str) -> None:
    policy = PolicySettings(stop=("Observation:", "Calling tools:", "</code>"), max_tokens=100)
    if not framework.startswith("smolagents"):
        policy = PolicySettings(max_tokens=100)
    turns, requests = RECORDED[framework]["turns"], RECORDED[framework]["requests"]
    calls = [read_call(request, policy) for request in requests]
    for place, (text, before, after) in enumerate(zip(turns, calls[:-1], calls[1:], strict=True)):
        turn = parse_turn(text, "hermes", before.tools, turn=place).message
        new = new_messages([*before.messages, turn], after.messages)
        if framework.startswith("smolagents"):
            assert new is None, "it writes its history anew"
        else:
            assert {one["role"] for one in new or ()} in ({"tool"}, {"user"})
    assert [call.stream for call in calls] == [bool(one.get("stream")) for one in requests]
