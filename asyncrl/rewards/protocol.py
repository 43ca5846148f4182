"""What the pool and a worker process say to each other, over the worker's standard streams.

Frames: four bytes of length (little-endian), then one msgspec MessagePack struct. The pool sends
one `Setup`, then `Call`s, which may wait in the stream. The worker answers `Setup` with `Ready` or
`Refused`, and each `Call` in turn with a `Began` per term as it starts, then `Scored` or `Raised`.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_FRAME = 64 * 1024 * 1024
"""Bytes; a longer frame means that the stream is broken."""


class Term(msgspec.Struct, frozen=True):
    """One function of the weighted sum."""

    name: str
    weight: float
    args: dict[str, Any]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The functions to load."""

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
    """Term number `term` starts now: names the culprit if nothing follows."""

    term: int


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The weighted sum."""

    value: float
    seconds: float
    """It took so long."""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """Term number `term` failed; `message` ends with the user's last traceback lines."""

    term: int
    message: str


ToWorker = Setup | Call
FromWorker = Ready | Refused | Began | Scored | Raised


def pack(message: ToWorker | FromWorker) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body
