"""A tokenizer's chat template as text: messages in, the text that the model reads out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import RenderingError

Message = dict[str, Any]
"""A chat message: `role` and `content`, and what the template knows besides (`tool_calls`)."""
Tools = Sequence[dict[str, Any]]
"""JSON schemas of the functions that the model may call."""


class ChatTemplate:
    """Renders messages.

    Args:
        tokenizer: an HF tokenizer with a chat template.
        arguments: further variables of the template (`enable_thinking`).
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})

    def render(
        self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, by default up to the place where the model answers.

        Raises:
            RenderingError: the template refuses the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._arguments,
            )
        except Exception as error:  # a template is a program, of the files of the model
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise RenderingError(
                f"the model's chat template refused a conversation of the roles {roles}: {error}. "
                "Answer the model in roles that its template knows, or give the model directory "
                "another chat_template.jinja"
            ) from error
        return str(text)


def end_of_turn(
    template: ChatTemplate,
    before: Sequence[Message],
    after: Sequence[Message],
    tools: Tools | None,
    *,
    generation_prompt: bool = True,
) -> str:
    """What the template puts behind the text of an assistant's turn.

    It renders the turn with a word of its own as content, and takes what follows that word. So the
    text of the turn, which the template may change, plays no part.

    Args:
        template: of the model.
        before: the conversation before the turn.
        after: the messages that answer it.
        tools: that the model may call.
        generation_prompt: whether the next turn of the assistant begins.

    Raises:
        RenderingError: the template refuses the messages, or does not show a turn's text once.
    """
    text, word = _with_placeholder(template, before, after, tools, generation_prompt)
    return text[text.index(word) + len(word) :]


def beginning_of_turn(
    template: ChatTemplate, before: Sequence[Message], after: Sequence[Message], tools: Tools | None
) -> str:
    """White space that the template puts before the text of a turn, and the policy generates.

    Mistral's templates have a space there. Raises RenderingError as `end_of_turn`.
    """
    text, word = _with_placeholder(template, before, after, tools, True)
    asked = template.render(before, tools)
    lead = text[len(asked) : text.index(word)]
    return lead if text.startswith(asked) and lead.isspace() else ""


def _with_placeholder(
    template: ChatTemplate,
    before: Sequence[Message],
    after: Sequence[Message],
    tools: Tools | None,
    generation_prompt: bool,
) -> tuple[str, str]:
    """A conversation in which a word stands for a turn, and the word."""
    word = "turn-of-the-policy"
    while word in repr((before, after, tools)):
        word += "-"
    turn = {"role": "assistant", "content": word}
    text = template.render([*before, turn, *after], tools, generation_prompt=generation_prompt)
    found = text.count(word)
    if found != 1:
        raise RenderingError(
            f"the model's chat template shows the text of an assistant's turn {found} times "
            "instead of once, so what follows a turn cannot be told; give the model directory "
            "another chat_template.jinja"
        )
    return text, word


def nearest_context(before: Sequence[Message]) -> list[Message]:
    """The messages that a turn's end can depend on in the templates in use.

    They are the system messages at the start and the last message of the user. Rendering only these
    keeps the cost of a turn independent of the number of turns before it.
    """
    first = list(before[:1])
    system = first if first and first[0].get("role") in ("system", "developer") else []
    users = (message for message in reversed(before) if message.get("role") == "user")
    return [*system, next(users, {"role": "user", "content": ""})]


def first_difference(expected: str, found: str, context: int = 40) -> str | None:
    """Where a text first differs from the one that it should begin with; None if it does not.

    Example:
        >>> first_difference("one two three", "one 2 three")
        "at character 4: 'one [two three]' became 'one [2 three]'"
        >>> first_difference("one", "one two") is None
        True
    """
    if found.startswith(expected):
        return None
    pairs = zip(expected, found, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    shared = expected[max(0, place - context) : place]
    ours, theirs = (f"{shared}[{text[place : place + context]}]" for text in (expected, found))
    return f"at character {place}: {ours!r} became {theirs!r}"
