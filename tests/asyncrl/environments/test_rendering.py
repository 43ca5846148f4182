"""The tokens around turns are those of the chat template, and turns keep the tokens drawn."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from chat_models import FAMILIES, chat_tokenizer, stop_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from asyncrl.environments.rendering import TurnRenderer
from asyncrl.errors import RenderingError

Messages = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "what is 1 + 1?"}
OBJECTION = {"role": "user", "content": "\n\nare you sure? it is 3"}
CALL_ID = "abcdefghi"
RESULT = {"role": "tool", "content": "the result is 3\n", "tool_call_id": CALL_ID}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": CALL_ID, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ],
}
CALL_TEXT = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama31": '{"name": "add", "parameters": {"a": 1}}',
    "mistral_v3": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
    "mistral_tekken": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
}


def renderer_of(name: str, **settings: Any) -> TurnRenderer:
    return TurnRenderer(chat_tokenizer(name), stop_tokens=stop_ids(name), **settings)


def ids_of(name: str, text: str) -> list[int]:
    ids: list[int] = chat_tokenizer(name)(text, add_special_tokens=False)["input_ids"]
    return ids


def whole(name: str, messages: Messages, tools: Any = None) -> list[int]:
    """What the template makes of a conversation that waits for the assistant."""
    text = chat_tokenizer(name).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return ids_of(name, text)


def converse(
    name: str, first: Messages, turns: list[tuple[list[int], Any, Messages]], tools: Any = None
) -> tuple[list[int], list[bool], Messages]:
    """The tokens of a conversation, which of them were generated, and its messages.

    A turn is its generated tokens, the assistant's message that they mean, and the answer to it.
    """
    renderer = renderer_of(name)
    messages, tokens = list(first), renderer.prompt(first, tools).tolist()
    generated = [False] * len(tokens)
    for turn, message, answer in turns:
        between = renderer.between(messages, answer, turn, tools).tolist()
        tokens += [*turn, *between]
        generated += [True] * len(turn) + [False] * len(between)
        messages += [message, *answer]
    return tokens, generated, messages


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "plain"])
@pytest.mark.parametrize("first", [[USER], [SYSTEM, USER]])
def test_a_conversation_is_what_the_template_makes_of_it(name: str, first: Messages) -> None:
    if name.startswith("mistral"):
        first = [USER]  # its template moves the system message to the user's last message
    space = " " if name == "mistral_v3" else ""  # the template puts it before the turn's text
    stop = stop_ids(name)[0]
    texts = ["it is 2.", "the answer is hello", "I think"]
    turns = [([*ids_after(name, space + text), stop], said(text), [OBJECTION]) for text in texts]
    tokens, _, messages = converse(name, first, turns)
    assert tokens == whole(name, messages)


def ids_after(name: str, text: str) -> list[int]:
    """The tokens of a text that follows a special token."""
    anchor = FAMILIES[name].stops[0]
    return ids_of(name, anchor + text)[1:]


@pytest.mark.parametrize("name", CALL_TEXT)
def test_calls_of_tools_are_what_the_template_makes_of_them(name: str) -> None:
    stop = stop_ids(name)[0]
    call = [*ids_after(name, CALL_TEXT[name]), stop]
    tokens, _, messages = converse(
        name, [USER], [(call, CALL, [RESULT]), (call, CALL, [RESULT])], TOOLS
    )
    assert tokens == whole(name, messages, TOOLS)


def test_several_results_at_once_and_reasoning_between_calls() -> None:
    reasoning = "<think>\nhello there\n</think>\n\n"
    turn = [*ids_of("qwen3", reasoning + CALL_TEXT["qwen3"]), stop_ids("qwen3")[0]]
    message = {**CALL, "content": reasoning.removesuffix("\n\n")}
    turns = [(turn, message, [RESULT, RESULT]), (turn, message, [RESULT])]
    tokens, _, messages = converse("qwen3", [USER], turns, TOOLS)
    tokenizer = chat_tokenizer("qwen3")
    # The template puts another line end between reasoning and call; all else is its own.
    text = tokenizer.decode(whole("qwen3", messages, TOOLS))
    assert tokenizer.decode(tokens) == text.replace("</think>\n\n\n", "</think>\n\n")
    assert text.count("<tool_response>") == 3


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(data=st.data())
def test_generated_tokens_stay_whatever_they_are(name: str, data: st.DataObject) -> None:
    tokenizer, stops = chat_tokenizer(name), stop_ids(name)
    ordinary = st.sampled_from(
        [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    )
    drawn = data.draw(
        st.lists(
            st.tuples(st.lists(ordinary, max_size=12), st.sampled_from([*stops, None])),
            min_size=1,
            max_size=3,
        )
    )
    turns = [[*ids, stop] if stop is not None else ids for ids, stop in drawn]
    script = [(turn, said("hello"), [OBJECTION]) for turn in turns]
    tokens, generated, _ = converse(name, [USER], script)
    assert [t for t, own in zip(tokens, generated, strict=True) if own] == list(
        itertools.chain(*turns)
    )
    # Each answer reads the same whatever stands before it, with the template's end of the turn if
    # the turn has none.
    text = tokenizer.decode([t for t, own in zip(tokens, generated, strict=True) if not own])
    assert text.count(OBJECTION["content"]) == len(turns)


def test_a_stop_token_stands_in_place_of_the_templates() -> None:
    renderer = renderer_of("llama31")
    eot, eom = stop_ids("llama31")
    text = ids_of("llama31", "hello")
    ended = renderer.between([USER], [RESULT], [*text, eot]).tolist()
    assert renderer.between([USER], [RESULT], [*text, eom]).tolist() == ended
    assert renderer.between([USER], [RESULT], text).tolist() == [eot, *ended]
    assert ended[0] == ids_of("llama31", "<|start_header_id|>")[0]


def test_no_merge_reaches_into_a_turn() -> None:
    """A template without special tokens: the text is the template's, the turn's tokens stay."""
    turn = ids_of("plain", "hello there")
    tokens, _, messages = converse(
        "plain", [USER], [(turn, said("hello there"), [{"role": "user", "content": "no"}])]
    )
    tokenizer = chat_tokenizer("plain")
    assert tokens != whole("plain", messages)  # whose last sign merges with the line end
    assert tokenizer.decode(tokens) == tokenizer.decode(whole("plain", messages))
    start = len(ids_of("plain", "user: what is 1 + 1?\nassistant: "))
    assert tokens[start : start + len(turn)] == turn
    assert any("without a special token" in finding for finding in renderer_of("plain").findings)


def test_a_template_that_changes_earlier_turns_is_found_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        renderer = renderer_of("qwen3")
        turn = [*ids_of("qwen3", "<think>\nhm\n</think>\n\nhello"), stop_ids("qwen3")[0]]
        kept = renderer.between([USER], [OBJECTION], turn)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "changes earlier turns" in warning
    assert "[<think>" in warning
    assert "environment.history: keep" in warning
    assert chat_tokenizer("qwen3").decode(kept).startswith("\n<|im_start|>user\n")
    # With `template` the next turn has a prompt of its own.
    prompt = renderer.rewritten([USER], [OBJECTION], turn)
    assert prompt is not None
    assert prompt.tolist() == whole("qwen3", [USER, said("hello"), OBJECTION])
    plain = [*ids_of("qwen3", "hello"), stop_ids("qwen3")[0]]
    assert renderer.rewritten([USER], [OBJECTION], plain) is None


@pytest.mark.parametrize("name", ["llama31", "custom", "mistral_v3", "mistral_tekken"])
def test_nothing_is_said_of_templates_that_only_grow(name: str) -> None:
    assert renderer_of(name).findings == ()


def test_mistrals_template_moves_the_tools_which_is_found_in_the_conversation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    renderer = renderer_of("mistral_tekken")
    turn = [*ids_of("mistral_tekken", "hello"), stop_ids("mistral_tekken")[0]]
    between = renderer.between([USER], [OBJECTION], turn, TOOLS)
    (finding,) = renderer.findings
    assert "[AVAILABLE_TOOLS]" in finding
    assert chat_tokenizer("mistral_tekken").decode(between).startswith("[AVAILABLE_TOOLS]")


def test_an_end_of_turn_that_is_no_stop_token_is_found() -> None:
    tokenizer = chat_tokenizer("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for role in (tokenizer, without_roles(tokenizer)):
        findings = TurnRenderer(role, stop_tokens=(end,)).findings
        assert any("<|im_end|>, which is not among" in finding for finding in findings)


def without_roles(tokenizer: Any) -> Any:
    """The same tokenizer, whose special tokens are marked as such and nothing else."""
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    bare.chat_template = tokenizer.chat_template
    assert not bare.all_special_ids
    return bare


def test_a_turn_costs_the_same_however_many_were_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer, rendered = renderer_of("custom"), []
    render = renderer._template.render  # type: ignore[union-attr]

    def counting(messages: Messages, *args: Any, **kwargs: Any) -> str:
        rendered[-1] += len(messages)
        return str(render(messages, *args, **kwargs))

    monkeypatch.setattr(renderer._template, "render", counting)
    messages: Messages = [SYSTEM, USER]
    turn = [*ids_of("custom", "hello"), stop_ids("custom")[0]]
    for _ in range(130):
        rendered.append(0)
        renderer.between(messages, [OBJECTION], turn)
        messages += [said("hello"), OBJECTION]
    checked = {0, 1, 3, 7, 15, 31, 63, 127}  # turn 1, 2, 4, ...
    assert {rendered[i] for i in range(130) if i not in checked} == {4}
    assert sum(rendered[i] for i in checked) < 13 * 130


def test_a_template_that_needs_all_turns_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer("custom")
    end = "{%- if add_generation_prompt"
    numbered = tokenizer.chat_template.replace(end, "{{ '#' ~ messages | length ~ '#' }}" + end)
    monkeypatch.setattr(tokenizer, "chat_template", numbered)
    renderer = renderer_of("custom")
    assert any("renders the whole conversation" in finding for finding in renderer.findings)
    turn = [*ids_of("custom", "hello"), stop_ids("custom")[0]]
    messages = [USER, said("hello"), OBJECTION]
    between = renderer.between(messages, [OBJECTION], turn)
    assert tokenizer.decode(between).endswith("#5#<assistant>")


def test_what_a_template_refuses_is_said() -> None:
    renderer = renderer_of("mistral_v3")
    turn = [*ids_of("mistral_v3", "hello"), stop_ids("mistral_v3")[0]]
    with pytest.raises(RenderingError, match=r"roles user, assistant, assistant.*must alternate"):
        renderer.between([USER], [said("more")], turn)
    with pytest.raises(RenderingError, match="9 signs"):
        renderer.between([USER], [{"role": "tool", "content": "3"}], turn)


def test_a_tokenizer_without_a_template_takes_texts_as_they_are() -> None:
    tokenizer = chat_tokenizer("plain")
    renderer = TurnRenderer(tokenizer, stop_tokens=stop_ids("plain"), chat_template=False)
    assert tokenizer.decode(renderer.prompt("hello there")) == "hello there"
    turn = [*ids_of("plain", "it is 2."), stop_ids("plain")[0]]
    assert tokenizer.decode(renderer.between([], "\nhello", turn)) == "\nhello"
    assert renderer.rewritten([], "\nhello", turn) is None
    with pytest.raises(RenderingError, match="empty"):
        renderer.prompt("")


def test_tokens_are_the_engines_type() -> None:
    renderer = renderer_of("custom")
    assert renderer.prompt([USER]).dtype == np.int32
    assert renderer.between([USER], [OBJECTION], [1]).dtype == np.int32


def test_no_space_is_added_or_lost_between_pieces() -> None:
    """This tokenizer puts a space before the first word of a text, and takes it away again."""
    name = "mistral_v3"
    tokenizer = chat_tokenizer(name)
    plain = TurnRenderer(tokenizer, stop_tokens=stop_ids(name), chat_template=False)
    pieces = tokenizer.convert_ids_to_tokens(plain.between([], "hello there", [5]).tolist())
    assert "".join(pieces) == "hello▁there"
    assert plain.turn_text(ids_after(name, " it is 2.")) == " it is 2."
    # The template itself puts that space there, so it is no part of the message.
    assert renderer_of(name).turn_text(ids_after(name, " it is 2.")) == "it is 2."
