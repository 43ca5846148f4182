"""The messages between the pool and a worker process, over the worker's standard streams.

Frames: four bytes of length (little-endian), then one msgspec MessagePack struct. The pool sends
one `Setup`, then `Call`s, which may queue up in the stream. The worker answers `Setup` with `Ready`
or `Refused`. It answers each `Call` in turn: a `Began` as each term starts, then `Scored` or
`Raised`.
"""

from __future__ import annotations

from typing import Any

import msgspec

HEAD_BYTES = 4
"""Bytes of the length before each frame."""

MAX_FRAME = 64 * 1024 * 1024
"""Length in bytes of the longest frame that is read."""


class Term(msgspec.Struct, frozen=True):
    """One function of the weighted sum."""

    name: str
    weight: float
    args: dict[str, Any]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Load these functions."""

    terms: tuple[Term, ...]
    search_path: str
    """Folder that the user's modules are imported from."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Score one response."""

    prompt: str
    response: str
    example: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All functions are loaded."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A function cannot be loaded; `message` says why."""

    message: str


class Began(msgspec.Struct, frozen=True, tag=True):
    """Term number `term` starts now. If nothing follows, it is the culprit."""

    term: int


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The reward of one response."""

    value: float
    """The weighted sum."""
    seconds: float
    """Time that scoring took in the worker."""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """Term number `term` failed; `message` holds the last lines of the user's traceback."""

    term: int
    message: str


ToWorker = Setup | Call
FromWorker = Ready | Refused | Began | Scored | Raised


def pack(message: ToWorker | FromWorker) -> bytes:
    """One frame, its length included."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def body_length(head: bytes) -> int:
    """Length in bytes of the frame that follows `head`.

    Raises:
        EOFError: `head` is cut short, or the frame is so long that the stream must be broken.
    """
    length = int.from_bytes(head, "little")
    if len(head) < HEAD_BYTES or length > MAX_FRAME:
        raise EOFError("the stream ended, or its next frame is too long to be one")
    return length
