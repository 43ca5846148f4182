"""Messages between nodes about weights. A chunk's bytes follow its message in the same frame.

A child has a bounded number of requested chunks outstanding, so a slow child does not fill its
parent's memory.
"""

from typing import Annotated

import msgspec

from asyncrl.wire.transport.decoding import Count
from asyncrl.wire.transport.keys import LineKeys

VersionName = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
"""`asyncrl.wire.weights.chunks.name_of` a manifest: a trainer that replaces another may publish a
policy version again."""
Crc32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Parent(msgspec.Struct, frozen=True):
    """A node that serves chunks."""

    name: str
    address: str
    keys: LineKeys | None
    """Keys with which this child connects to it; None on this machine only."""


class Ask(msgspec.Struct, frozen=True, tag="ask", tag_field="type"):
    """A child requests one chunk, to be sent as soon as the parent has it."""

    version: VersionName
    index: Count
    base: VersionName | None = None
    """A version that the child holds: a delta to it may be sent."""


class Chunk(msgspec.Struct, frozen=True, tag="chunk", tag_field="type"):
    """A parent announces that the bytes that follow are a chunk, or the delta to it."""

    version: VersionName
    index: Count
    checksum: Crc32
    """Checksum of the whole chunk, after a delta was applied."""
    base: VersionName | None = None
    """The version that the delta refers to; None: the bytes are the chunk."""
    more: bool = False
    """True if others that the child asked for are ready too: the path to it is the bottleneck."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting", tag_field="type"):
    """A parent gives a sign of life while the requested chunk has not arrived there."""

    version: VersionName


class Gone(msgspec.Struct, frozen=True, tag="gone", tag_field="type"):
    """A parent reports that the rest of this version will never arrive there."""

    version: VersionName
    why: str


ToParent = Ask
FromParent = Chunk | Waiting | Gone
