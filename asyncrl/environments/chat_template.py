"""What a model's chat template puts around the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import RenderingError
from asyncrl.tasks.templates.chat_template import ChatTemplate, Message, Tools


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
