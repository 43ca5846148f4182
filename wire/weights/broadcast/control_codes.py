"""What the sender says before each chunk and at the end, and how a broadcast ends. No torch."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

Outcome = Literal["whole", "overwritten", "broken"]
"""Of a broadcast: all members have the version; the trainer published two more meanwhile; or a
member was lost or too slow, and all of them read the file."""


class Word(IntEnum):
    """What follows.

    It is broadcast before each chunk as `[4]` int64, with the policy version, the chunk's index and
    its checksum. A member that is out of step finds that out by the first three.
    """

    CHUNK = 1
    """The next chunk."""
    WHOLE = 2
    """Nothing; the version was whole while each chunk was read."""
    OVERWRITTEN = 3
    """Nothing; the trainer has begun to overwrite the version."""
