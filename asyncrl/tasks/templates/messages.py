"""What a process asks of the one that renders its chat templates, and the answers.

Each is a frame (`user_code.streams`). A `Render` is answered with one `Rendered` for each of
its conversations, in order, or ends with a `Failed`. What goes there is pickled, so that a template
gets the very values that it would get here; what comes back is text. Import-light.
"""

from __future__ import annotations

import msgspec

MAX_TEXT = 32 << 20
"""Most characters of a rendered conversation."""


class Limits(msgspec.Struct, frozen=True):
    """What one rendering may take."""

    seconds: float = 5.0
    """Of processor time, so that a busy machine does not count."""
    memory: int = 1 << 30
    """Bytes of address space of the whole process."""


class Render(msgspec.Struct, frozen=True):
    """Render these conversations."""

    limits: Limits
    template: bytes
    """Pickled: the template's text and the variables that all conversations have."""
    conversations: list[bytes]
    """Pickled: the messages of each."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A conversation as the template writes it."""

    text: bytes
    """UTF-8, in which halves of characters may stand alone."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The template failed; the conversations after this one are not rendered."""

    message: str
    line: int | None = None
    """Of the template, from 1; None: not known."""


Answer = Rendered | Failed
