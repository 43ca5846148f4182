"""What of a row is learned: tokens, masks and refusals of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import DataError
from asyncrl.rollout.trajectory import Provenance
from asyncrl.tasks.builtin.tokenizer import builtin_tokenizer
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.examples import Example, ExampleEncoder
from asyncrl.tasks.prompts import Messages, Question
from asyncrl.tasks.sft_config import SftConfig

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
FORGETFUL = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'][:1 if m['role'] == 'assistant' and not loop.last else 9] }}",
)
"""Writes all answers but the last message in another way, as Qwen3 does with thinking."""
PART = {"type": "text", "text": "2"}
TALK: Messages = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "22"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "44"},
]


def encoded(
    content: str | Messages,
    row: dict[str, Any] | None = None,
    template: str | None = TEMPLATE,
    **settings: Any,
) -> list[Example]:
    """The examples of one row."""
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = template
    task = TaskConfig(kind="dataset", path="rows.jsonl")
    encoder = ExampleEncoder(tokenizer, task, SftConfig(**settings))
    return encoder.examples([Question("7", content, {"row": row or {}}, "rows.jsonl, line 8")])


def marked(example: Example) -> str:
    """Its text, learned parts in brackets."""
    tokenizer = builtin_tokenizer()
    text, inside = tokenizer.decode(example.prompt), False
    for token, learned in zip(example.tokens, example.learned, strict=True):
        text += "[" if learned and not inside else "]" if inside and not learned else ""
        text, inside = text + tokenizer.decode([token]), bool(learned)
    return str(text + "]" * inside).replace(tokenizer.eos_token, "$")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"content": "1+1", "row": {"response": "2"}}, ["u:1+1.$a:[2.$]"]),
        (
            {"content": TALK[:3], "row": {"response": [TALK[3]]}},
            ["u:1+1.$a:22.$u:2+2.$a:[44.$]"],
        ),
        ({"content": "1+1", "row": {"response": "2"}, "template": None}, ["1+1[2$]"]),
        ({"content": TALK, "learn": "assistant"}, ["u:1+1.$a:[22.$]u:2+2.$a:[44.$]"]),
        ({"content": TALK[:3], "learn": "assistant"}, ["u:1+1.$a:[22.$]"]),
        (
            {"content": TALK, "learn": "assistant", "template": FORGETFUL},
            ["u:1+1.$a:[22.$]", "u:1+1.$a:2.$u:2+2.$a:[44.$]"],
        ),
        ({"content": "12+34", "learn": "text"}, ["1[2+34$]"]),
        ({"content": "12+34<end>", "learn": "text"}, ["1[2+34$]"]),
        ({"content": TALK[1:], "learn": "assistant"}, ["a:22.$u:2+2.$a:[44.$]"]),
        (
            {"content": "1+1", "row": {"response": [{"role": "assistant", "content": [PART]}]}},
            ["u:1+1.$a:[2.$]"],
        ),
        (
            {
                "content": TALK,
                "learn": "assistant",
                "max_tokens": 13,
                "too_long": "truncate",
            },
            ["u:1+1.$a:[22.$]"],
        ),
    ],
    ids=[
        *("response", "messages as response", "no template", "assistant", "ends with a user"),
        *("rewritten turns", "text", "text with its end", "begins with an answer"),
        *("parts", "truncated"),
    ],
)
def test_what_is_learned(given: dict[str, Any], expected: list[str]) -> None:
    """And nothing else is, not even in the records that the learner takes."""
    found = encoded(**given)
    assert [marked(one) for one in found] == expected
    for one in found:
        sample = one.trajectory(3, version=5)
        assert (sample.trained == one.learned).all()
        assert set(sample.provenance) <= {Provenance.SAMPLED, Provenance.OBSERVED}
        assert sample.staleness(5).max() == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"content": "1", "row": {"answer": "2"}}, "line 8: .* no 'response'; sft.response_field"),
        ({"content": "1", "row": {"response": 2}}, "line 8: its 'response' .* must be a text"),
        ({"content": "1", "row": {"response": [TALK[0]]}}, "line 8: .* the roles are user, user"),
        ({"content": TALK, "learn": "text"}, "line 8: sft.learn: text takes a text"),
        (
            {"content": TALK[:1], "learn": "assistant"},
            "line 8: .* no message of the role assistant",
        ),
        ({"content": TALK, "learn": "assistant", "template": None}, "line 8: .* chat template"),
        (
            {"content": "1", "row": {"response": "2"}, "max_tokens": 3},
            r"line 8: the example has 10 tokens, more than sft.max_tokens \(3\)",
        ),
        (
            {
                "content": "1",
                "row": {"response": "2"},
                "template": "{% if add_generation_prompt %}b{% else %}c{% endif %}",
            },
            "line 8: .* writes the messages before an answer in another way",
        ),
    ],
)
def test_rows_that_cannot_be_learned_are_named(given: dict[str, Any], said: str) -> None:
    """With the line, and the setting to change."""
    with pytest.raises(DataError, match=said):
        encoded(**given)


def test_examples_that_are_too_long_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the user wishes."""
    row = {"response": "2"}
    assert encoded("1" * 9, row, max_tokens=10, too_long="filter") == []
    assert "left out 1 examples longer than 10 tokens" in caplog.text
    assert len(encoded("1", row, max_tokens=10, too_long="filter")) == 1


def test_unusable_rows_are_skipped_where_the_task_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And counted, with the first one's reason."""
    task = TaskConfig(kind="dataset", path="rows.jsonl", on_bad_row="skip", chat_template="never")
    encoder = ExampleEncoder(builtin_tokenizer(), task, SftConfig())
    rows: list[dict[str, Any]] = [{"response": "2"}, {"response": None}, {}]
    questions = [
        Question(str(n), "1+1", {"row": row}, f"rows.jsonl, line {n}") for n, row in enumerate(rows)
    ]
    assert [one.name for one in encoder.examples(questions)] == ["0"]
    assert "left out 2 rows (task.on_bad_row: skip), the first: rows.jsonl, line 1" in caplog.text


def test_an_example_is_at_most_what_the_model_reads() -> None:
    """Without `sft.max_tokens`, too."""
    task = TaskConfig(kind="dataset", path="rows.jsonl", chat_template="never")
    encoder = ExampleEncoder(builtin_tokenizer(), task, SftConfig(), most_tokens=5)
    question = Question("0", "1+1", {"row": {"response": "222"}}, "rows.jsonl, line 1")
    with pytest.raises(DataError, match=r"7 tokens, more than the model's limit \(5\)"):
        encoder.examples([question])
