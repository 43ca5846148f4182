"""Messages between relays about files of a node's folder of the run, one request at a time."""

from typing import Annotated

import msgspec

from asyncrl.wire.transport.decoding import Count
from asyncrl.wire.transport.keys import LineKeys

PART_BYTES = 1 << 20
FilePath = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
"""Relative to the folder, with forward slashes; `asyncrl.relay` decides which are served."""


class Server(msgspec.Struct, frozen=True):
    """A relay that serves its folder."""

    name: str
    address: str
    keys: LineKeys


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of both directions."""

    number: Count


class ListFiles(Message, frozen=True):
    """Request a list of the files."""


class ReadFile(Message, frozen=True):
    """Request a part of a file."""

    path: FilePath
    offset: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=PART_BYTES)]


class RemoveFile(Message, frozen=True):
    """Remove a file that was copied, unless it was replaced since."""

    path: FilePath
    size: Count
    changed: Count


ToServer = ListFiles | ReadFile | RemoveFile


class FileInfo(msgspec.Struct, frozen=True):
    """One file."""

    path: FilePath
    size: Count
    changed: Count
    """Nanoseconds since 1970."""


class FileList(Message, frozen=True):
    """All files that are served."""

    files: tuple[FileInfo, ...]


class FilePart(Message, frozen=True):
    """Bytes of a file, fewer than asked for only at its end."""

    data: bytes
    size: Count
    changed: Count


class FileRemoved(Message, frozen=True):
    """The file does not exist any more."""


class NotServed(Message, frozen=True):
    """The request cannot be answered."""

    reason: str


FromServer = FileList | FilePart | FileRemoved | NotServed
