"""The messages between `asyncrl.tasks.templates.chat_template` and the process that renders.

They are frames (`user_code.streams`). A `Render` is answered with one `Rendered` for each of its
conversations, in order, or ends with a `Failed`. Requests are pickled, so that a template gets the
same values as in the process that asks; responses are text. Import-light: the process imports no
more of asyncrl than it needs to start.
"""

import msgspec

MAX_TEXT = 32 << 20
"""Longest text of a rendering, in bytes."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of one rendering."""

    seconds: float = 5.0
    """Processor time, which does not depend on other load of the machine."""
    memory: int = 1 << 30


class Render(msgspec.Struct, frozen=True):
    """Render these conversations."""

    limits: Limits
    template: bytes
    """Pickled: the template's text and the variables common to all conversations."""
    conversations: list[bytes]


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A conversation as the template writes it."""

    text: bytes
    """UTF-8 that may contain lone surrogates."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The template failed; the conversations after this one are not rendered."""

    message: str
    line: int | None = None
    """The template's line, from 1; None if unknown."""


Answer = Rendered | Failed
