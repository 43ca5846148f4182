"""Extracts the text that a model's chat template puts around the turns of a conversation."""

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
    """Return the text that the template puts behind an assistant's turn.

    The turn is rendered with a placeholder as its content, and the text after the placeholder is
    taken, so that a template that changes the content does not matter. `before` is the conversation
    before the turn, `after` the messages that answer it. With `generation_prompt`, the next
    assistant turn begins. Raises RenderingError if the template refuses the messages or does not
    show the turn's text exactly once.
    """
    text, word = _with_placeholder(template, before, after, tools, generation_prompt)
    return text[text.index(word) + len(word) :]


def beginning_of_turn(
    template: ChatTemplate, before: Sequence[Message], after: Sequence[Message], tools: Tools | None
) -> str:
    """Return white space that the template puts before a turn's text and the policy generates.

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
    """Render a conversation with a placeholder for a turn; return the text and the placeholder."""
    word = "turn-of-the-policy"
    while word in repr((before, after, tools)):
        word += "-"
    turn = {"role": "assistant", "content": word}
    text = template.render([*before, turn, *after], tools, generation_prompt=generation_prompt)
    found = text.count(word)
    if found != 1:
        raise RenderingError(
            f"the model's chat template shows the text of an assistant's turn {found} times "
            "instead of once, so the text after a turn is unknown; give the model directory "
            "another chat_template.jinja"
        )
    return text, word


def nearest_context(before: Sequence[Message]) -> list[Message]:
    """Return the messages that a turn's end can depend on, independent of the turns' number."""
    first = list(before[:1])
    system = first if first and first[0].get("role") in ("system", "developer") else []
    users = (message for message in reversed(before) if message.get("role") == "user")
    return [*system, next(users, {"role": "user", "content": ""})]


def first_difference(expected: str, found: str, context: int = 40) -> str | None:
    """Describe the first difference between a text and its expected beginning; None if equal.

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
