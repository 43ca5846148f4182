"""Chat templates of strangers: the text that transformers makes, under limits, and errors."""

from __future__ import annotations

import copy
import datetime as dt
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_models import FAMILIES, chat_tokenizer
from further_templates import FURTHER
from transformers.utils.chat_template_utils import _compile_jinja_template

from asyncrl.errors import DataError, RenderingError
from asyncrl.tasks.builtin.tokenizer import AGENT_VOCABULARY, make_tokenizer
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.prompts import PromptEncoder, Question
from asyncrl.tasks.supervised import ProcessEnded
from asyncrl.tasks.templates import chat_template
from asyncrl.tasks.templates.chat_template import ChatTemplate
from asyncrl.tasks.templates.messages import MAX_TEXT, Limits
from asyncrl.tasks.templates.worker import environment
from asyncrl.user_code.process_tree import descendants

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "what is 1 + 1?\n\n<b>&amp;</b> ünï 🙂"}
SAID = {"role": "assistant", "content": "<think>\nso\n</think>\n\n 2 "}
CALL = {"name": "add", "arguments": {"a": 1, "b": [None, True, 2.5], "ü": "<>"}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "name": "add", "content": "3\n", "tool_call_id": "abcdefghi"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
ODD = {
    "role": "user",
    "content": "a\ud800b",
    "big": 10**30,
    "day": dt.datetime(2024, 2, 29),  # noqa: DTZ001 - whatever a row has
    "pair": (1, 2),
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, SAID, USER],
    [SYSTEM, USER, SAID, USER, SAID],
    [USER, CALLED, RESULT],
    [USER, CALLED, RESULT, SAID, USER],
    [USER, USER],
    [SAID],
    [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
    [{"role": "user", "content": None}],
    [{"role": "critic", "content": "?"}],
    [ODD],
    [],
]
EVERYTHING = """\
{% for message in messages %}
  {{- message }}|{{ message | tojson }}|{{ message.content | tojson(indent=2) | default("x") }}
  {% generation %}{{ message.role }}{% endgeneration %}
  {%- if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{{ tools }} {{ documents }} {{ bos_token }} {{ enable_thinking }} {{ nothing }}
{{- strftime_now("%d") }}"""


class Asked:
    """A tokenizer with a template of the test's."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012 - nothing writes it

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, *, tools: Any) -> str:
        return self.chat_template

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[len(text)] for text in texts]}


def encode(template: str, rows: int = 3) -> list[str]:
    """The texts of prompts, as a task is loaded."""
    questions = [Question(str(i), f"row {i}", {}, f"q.jsonl:{i + 1}") for i in range(rows)]
    prompts, _ = PromptEncoder(Asked(template), TaskConfig()).encode(questions)
    return [prompt.text for prompt in prompts]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMITS", Limits(seconds=0.5))


def both(tokenizer: Any, messages: Any, tools: Any, prompt: bool, **more: Any) -> list[str | None]:
    """The text by us and by transformers; None: refused."""
    found: list[str | None] = []
    try:
        ours = ChatTemplate(tokenizer, more)
        found.append(ours.render(messages, tools, generation_prompt=prompt))
    except RenderingError:
        found.append(None)
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **more
        )
        found.append(text)
    except Exception:  # noqa: BLE001 - a template fails with any
        found.append(None)
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *FURTHER, "agent", "everything"])
def test_texts_are_those_of_transformers(name: str) -> None:
    if name == "agent":
        tokenizer = make_tokenizer(AGENT_VOCABULARY)
    else:
        tokenizer = copy.deepcopy(chat_tokenizer("qwen3" if name == "everything" else name))
    if name == "everything":
        tokenizer.chat_template = EVERYTHING
    texts = set()
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                ours, theirs = both(tokenizer, messages, tools, prompt, enable_thinking=False)
                assert ours == theirs
                texts.add(ours)
    assert len(texts) > 5


def test_a_template_for_tools_is_chosen_as_transformers_chooses_it() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("qwen3"))
    tokenizer.chat_template = {"default": "plain {{ messages }}", "tool_use": "tools {{ tools }}"}
    for tools in (None, TOOLS):
        ours, theirs = both(tokenizer, [USER], tools, True)
        assert ours == theirs is not None
    tokenizer.chat_template = {"rag": "{{ messages }}"}
    with pytest.raises(RenderingError, match="multiple chat templates with no default"):
        ChatTemplate(tokenizer).render([USER], None)


def test_the_environment_is_that_of_transformers() -> None:
    ours, theirs = environment(), _compile_jinja_template("nothing").environment
    assert type(ours) is type(theirs)
    names = ("trim_blocks", "lstrip_blocks", "autoescape", "optimized", "keep_trailing_newline")
    for name in (*names, "undefined", "finalize", "newline_sequence", "intercepted_binops"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("filters", "globals", "tests", "policies"):
        assert getattr(ours, name).keys() == getattr(theirs, name).keys(), name
        own = {
            key
            for key, value in getattr(ours, name).items()
            if getattr(theirs, name)[key] is not value and name != "policies"
        }
        assert own <= {"tojson", "raise_exception", "strftime_now"}, name
    tags = [{tag for one in of.extensions.values() for tag in one.tags} for of in (ours, theirs)]
    assert tags[0] == tags[1] == {"generation", "break", "continue"}


LOOPS = """\
{% for a in range(100000) %}
{% for b in range(100000) %}
{% set c = b %}{% endfor %}{% endfor %}"""
TEXT = """\
start
{% for a in range(100000) %}{% for b in range(100000) %}
{{ messages[0].content * 1000 }}{% endfor %}{% endfor %}"""
ITSELF = "{% macro f(n) %}\n{{ f(n + 1) }}{% endmacro %}\n{{ f(0) }}"
HOSTILE = {
    "loops": (LOOPS, "line [23]: it takes more than 0.5 s of processor time"),
    "text": (TEXT, "line 3: it (takes more than 0.5 s|writes more than 32 MiB)"),
    "memory": ("a\n{{ 'x' * 3000000000 }}", "line 2: it takes more than 1,024 MiB of memory"),
    "list": (
        "\n\n{% set x = [0] * 900000000 %}{{ x | length }}",
        "line 3: it takes more than 1,024 MiB of memory",
    ),
    "range": (
        "a\n{% for i in range(10**12) %}{% endfor %}",
        "line 2: OverflowError: Range too big",
    ),
    "itself": (ITSELF, "line 2: RecursionError: maximum recursion depth"),
    "types": (
        "{% for message in messages %}\n{{ message.content + none }}{% endfor %}",
        "line 2: TypeError: can only concatenate str",
    ),
    "zero": ("\n\n{{ 1 // (messages | length - 1) }}", "line 3: ZeroDivisionError"),
    "missing": ("\n{{ messages[0].no.no }}", "line 2: 'dict object' has no attribute 'no'"),
    "syntax": ("\n\n{% for %}", "line 3: Expected an expression"),
    "filter": ("\n{{ messages | nosuch }}", "line 2: No filter named 'nosuch'"),
    "refused": ("\n{{ raise_exception('users only') }}", "line 2: users only"),
    "escape": ("\n{{ raise_exception('\x1b[2Jgone') }}", "line 2: .{0,6}\\[2Jgone"),
    "inside": ("\n{{ ''.__class__.__mro__ }}", "line 2: access to attribute '__class__'"),
    "nested": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "steps of C": (
        "\n{{ (messages | length + 9) ** (10 ** 9 + messages | length) }}",
        "it takes more than 0.5 s of processor time",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_all_or_fails_ends_in_one_sentence(quick: None, name: str) -> None:
    template, message = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=message) as caught:
        encode(template)
    assert str(caught.value).startswith("q.jsonl:1: the chat template refused")
    assert len(str(caught.value)) < 300
    assert "\x1b" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    assert encode("{{ messages[0].content }}") == ["row 0", "row 1", "row 2"]  # it goes on
    with pytest.raises(RenderingError, match=f"(?s)of the roles user: .*{message}.*another chat_"):
        ChatTemplate(Asked(template)).render([USER], None)


def test_the_row_that_fails_is_named() -> None:
    assert len(encode("{{ messages[0].content }}", rows=200)) == 200
    template = "{% if '131' in messages[0].content %}\n{{ 1 + none }}{% endif %}"
    with pytest.raises(DataError, match=r"^q\.jsonl:132: .* line 2: TypeError"):
        encode(template, rows=200)
    questions = [Question(str(i), "x" * 700_000, {}, f"q:{i}") for i in range(5)]
    unsent = [{"role": "user", "content": "a", "more": lambda: None}]
    bad = Question("5", unsent, {}, "q:5")
    with pytest.raises(DataError, match=r"^q:5: .* a value cannot be given to the template"):
        PromptEncoder(Asked("{{ messages }}"), TaskConfig()).encode([*questions, bad])


def test_a_conversation_has_a_largest_size() -> None:
    large = [{"role": "user", "content": "x" * (MAX_TEXT + 1)}]
    with pytest.raises(RenderingError, match="line 2: it writes more than 32 MiB of text"):
        ChatTemplate(Asked("\n{{ messages[0].content }}")).render(large, None)
    large = [{"role": "user", "content": "x" * (MAX_TEXT * 2 + 1)}]
    with pytest.raises(RenderingError, match="the messages have 64 MiB"):
        ChatTemplate(Asked("")).render(large, None)
    just = [{"role": "user", "content": "x" * (MAX_TEXT // 2)}]
    assert len(ChatTemplate(Asked("{{ messages[0].content }}")).render(just, None)) == MAX_TEXT // 2


def test_a_process_that_was_lost_is_started_again() -> None:
    template = ChatTemplate(Asked("{{ messages[0].role }}"))
    assert template.render([USER], None) == "user"
    for pid in descendants(os.getpid()):
        if "template_worker" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    assert template.render([USER], None) == "user"


class Fake:
    """A process that ends, or does not answer."""

    def __init__(self, ended: ProcessEnded | None) -> None:
        self.ended = ended
        self.closed = False

    def send(self, frame: bytes, seconds: float) -> bool:
        return True

    def frame(self, seconds: float) -> None:
        if self.ended is not None:
            raise self.ended

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def renderer() -> Iterator[Any]:
    made = chat_template._Renderer()
    yield made
    made.close()


def test_one_that_ends_again_and_again_is_an_error(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [Fake(ProcessEnded("ended with exit code 7", 7)) for _ in range(2)]
    renderer._process, renderer._owner = fakes[0], os.getpid()
    monkeypatch.setattr(chat_template, "SupervisedProcess", lambda *_: fakes[1])
    asked = chat_template._pickled(("{{ messages[0].role }}", {}))
    with pytest.raises(RenderingError, match="its process ended with exit code 7"):
        list(renderer.texts(asked, [[USER]]))
    assert [fake.closed for fake in fakes] == [True, True]


def test_one_that_is_idle_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Any] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, call: Any, arguments: list[Any]) -> None:
            self.seconds, self.call, self.arguments = seconds, call, arguments
            timers.append(self)

        def start(self) -> None:
            assert self.daemon

    process: Any = Fake(None)
    monkeypatch.setattr(chat_template, "SupervisedProcess", lambda *_: process)
    clock: Any = iter((160.0, 179.0, 180.0)).__next__
    timer: Any = Timer
    renderer = chat_template._Renderer(clock, timer)
    assert renderer._started() == (process, True)
    renderer._used = 120.0
    for _ in range(3):
        assert not process.closed
        timers[-1].call(*timers[-1].arguments)
    assert process.closed
    assert [timer.seconds for timer in timers] == [60.0, 20.0, 1.0]


def test_one_that_does_not_answer_is_ended(renderer: Any) -> None:
    fake = renderer._process = Fake(None)
    renderer._owner = os.getpid()
    asked = chat_template._pickled(("{{ messages[0].role }}", {}))
    with pytest.raises(RenderingError, match="it did not answer within 120 s"):
        list(renderer.texts(asked, [[USER]]))
    assert fake.closed
    assert list(renderer.texts(asked, [[USER], [SYSTEM]])) == ["user", "system"]


def test_a_tokenizer_without_a_template_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(chat_template, "SupervisedProcess", started)
    monkeypatch.setattr(chat_template._RENDERER, "_process", None)
    assert encode("") == ["row 0", "row 1", "row 2"]
