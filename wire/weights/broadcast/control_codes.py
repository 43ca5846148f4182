"""The sender's message before each chunk and at the end, and outcomes. Imports no torch."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

Outcome = Literal["whole", "overwritten", "broken"]
"""Outcome of a broadcast: all members have the version; the trainer has published two more since;
or a member was lost or too slow, and all of them read the file."""


class ControlCode(IntEnum):
    """Announces what follows, before each chunk, as `[4]` int64.

    The policy version and the chunk's index reveal a member that is out of step.
    """

    CHUNK = 1
    WHOLE = 2
    """The end; the version was unchanged while each chunk was read."""
    OVERWRITTEN = 3
    """The end; the trainer has begun to overwrite the version."""
