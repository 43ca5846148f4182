"""Between relays: the files of a node's folder of the run. Requests, and the answers to them.

A relay answers one request after the other. A peer has one request outstanding.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncrl.wire.transport.decoding import Count
from asyncrl.wire.transport.keys import LineKeys

PART_BYTES = 1 << 20
"""Longest part of a file in one answer."""
FilePath = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
"""Relative to the folder, with forward slashes; which are served: `asyncrl.relay`."""


class Server(msgspec.Struct, frozen=True):
    """Where a relay serves its folder."""

    name: str
    """Of the relay."""
    address: str
    """Its ZeroMQ address."""
    keys: LineKeys
    """With which one other relay connects to it."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of both directions."""

    number: Count
    """Of the request; its answer has it too."""


class ListFiles(Message, frozen=True):
    """Which files are there?"""


class ReadFile(Message, frozen=True):
    """Send a part of a file."""

    path: FilePath
    offset: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=PART_BYTES)]


class RemoveFile(Message, frozen=True):
    """A file was copied and is not needed here any more, unless it was replaced since."""

    path: FilePath
    size: Count
    """As in the `FileInfo` of what was copied."""
    changed: Count
    """The same."""


ToServer = ListFiles | ReadFile | RemoveFile


class FileInfo(msgspec.Struct, frozen=True):
    """One file."""

    path: FilePath
    size: Count
    """Bytes."""
    changed: Count
    """Nanoseconds since 1970."""


class FileList(Message, frozen=True):
    """All files that are served."""

    files: tuple[FileInfo, ...]


class FilePart(Message, frozen=True):
    """Bytes of a file, fewer than asked for only at its end."""

    data: bytes
    size: Count
    """Of the whole file now."""
    changed: Count
    """As in `FileInfo`."""


class FileRemoved(Message, frozen=True):
    """It is not there any more."""


class NotServed(Message, frozen=True):
    """The request cannot be answered."""

    reason: str


FromServer = FileList | FilePart | FileRemoved | NotServed
