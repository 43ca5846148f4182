"""Conversations in the chat templates of further families: equal to the template's, or named."""

from __future__ import annotations

from typing import Any

import pytest
from chat_models import chat_tokenizer, stop_ids

from asyncrl.environments.rendering import TurnRenderer

Messages = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "what is 1 + 1?"}
DOUBT = {"role": "user", "content": "are you sure? it is 3"}
RESULT = {"role": "tool", "content": "the result is 3", "tool_call_id": "abcdefghi", "name": "add"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def conversation(
    name: str, first: Messages, turns: list[tuple[str, str, Messages, Messages]], tools: Any = None
) -> tuple[str, str, TurnRenderer]:
    """What the policy reads after turns, and what the template makes of it; ids are compared.

    A turn is its text, its stop token, the messages that it means, and the answer.
    """
    tokenizer = chat_tokenizer(name)
    renderer = TurnRenderer(tokenizer, stop_tokens=stop_ids(name))
    messages, ids = list(first), renderer.prompt(first, tools).tolist()
    for text, stop, means, answer in turns:
        anchor = tokenizer.all_special_tokens[0]
        turn = tokenizer(anchor + text + stop, add_special_tokens=False)["input_ids"][1:]
        ids += [*turn, *renderer.between(messages, answer, turn, tools).tolist()]
        messages += [*means, *answer]
    whole = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    same = ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    read = tokenizer.decode(ids)
    assert same == (read == whole), "equal texts with other tokens"
    return read, whole, renderer


STOPS = {
    "gemma3": "<end_of_turn>",
    "phi4": "<|im_end|>",
    "qwen25": "<|im_end|>",
    "command_r": "<|END_OF_TURN_TOKEN|>",
}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("first", [[USER], [SYSTEM, USER]])
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_the_policy_reads_is_the_templates(name: str, first: Messages, is_cut: bool) -> None:
    texts = ["it is 2.", "I think", "<think>\nhm\n</think>\n\nit is 2"]
    stop = "" if is_cut else STOPS[name]
    turns = [(text, stop, [said(text)], [DOUBT]) for text in texts]
    read, whole, renderer = conversation(name, first, turns)
    assert read == whole
    assert renderer.findings == ()


def test_calls_of_qwen25_and_their_answers_are_the_templates() -> None:
    text = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    means = [said("so", tool_calls=[CALL])]
    turns = [(text, "<|im_end|>", means, [RESULT, RESULT]), (text, "<|im_end|>", means, [RESULT])]
    read, whole, renderer = conversation("qwen25", [USER], turns, TOOLS)
    assert (read, renderer.findings) == (whole, ())


@pytest.mark.parametrize("stop", ["<|observation|>", ""])
def test_a_turn_may_end_with_the_token_of_the_next_role(stop: str) -> None:
    """GLM's do. It is drawn by the policy, so it is not put there again."""
    text = "\n<think>hm</think>\ncall it"
    turns = [(text, stop, [said(text)], [RESULT, RESULT]), (text, stop, [said(text)], [RESULT])]
    read, whole, renderer = conversation("glm45", [USER], turns, TOOLS)
    assert read == whole
    (finding,) = renderer.findings
    assert "changes earlier turns" in finding


def test_a_token_of_another_role_than_the_next_stays() -> None:
    read, _, _ = conversation("glm45", [USER], [("so", "<|observation|>", [said("so")], [DOUBT])])
    assert read.endswith("so<|observation|><|user|>\nare you sure? it is 3<|assistant|>")


def test_reasoning_that_the_template_opens_and_leaves_out_is_named() -> None:
    end = "<|end_of_sentence|>"
    turns = [("hm\n</think>\n\nit is 2", end, [said("hm\n</think>\n\nit is 2")], [DOUBT])]
    read, whole, renderer = conversation("deepseek_r1", [USER], turns)
    assert read != whole
    assert read.endswith(f"it is 2{end}<|User|>are you sure? it is 3<|Assistant|><think>\n")
    (finding,) = renderer.findings
    assert "[<think>" in finding
    # The second answer of a tool depends on there having been a first one.
    called = [("call it", end, [said("call it")], [RESULT])] * 3
    read, whole, renderer = conversation("deepseek_r1", [USER], called, TOOLS)
    assert read.removeprefix("<s><|User|>what is 1 + 1?<|Assistant|><think>\n") == (
        whole.removeprefix("<s><|User|>what is 1 + 1?<|Assistant|>")
    )
    assert any("renders the whole conversation" in one for one in renderer.findings)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("phi4", "does not show the content of such a message"), ("gemma3", "refuses it (")],
)
def test_a_template_without_answers_of_tools_is_named_at_the_first_prompt(
    name: str, sentence: str
) -> None:
    renderer = TurnRenderer(chat_tokenizer(name), stop_tokens=stop_ids(name))
    renderer.prompt([USER])
    assert renderer.findings == ()
    renderer.prompt([USER], TOOLS)
    (finding,) = renderer.findings
    assert "a message of the role tool" in finding
    assert sentence in finding


def test_a_role_that_the_template_does_not_show_is_named_once() -> None:
    renderer = TurnRenderer(chat_tokenizer("phi4"), stop_tokens=stop_ids("phi4"))
    for _ in range(3):
        renderer.between([USER], [{"role": "critic", "content": "no"}], [1, stop_ids("phi4")[0]])
    (finding,) = renderer.findings
    assert "a message of the role critic" in finding
