"""What the sender says before each chunk, and at the end: one int64, broadcast like a chunk."""

from __future__ import annotations

from enum import IntEnum


class Word(IntEnum):
    """What follows."""

    CHUNK = 1
    """The next chunk."""
    WHOLE = 2
    """Nothing; the version was whole while each chunk was read."""
    OVERWRITTEN = 3
    """Nothing; the trainer has begun to overwrite the version."""
