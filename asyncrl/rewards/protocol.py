"""The messages between the pool and a worker process.

Each is a frame on the worker's standard streams (`asyncrl.user_code.streams`). The pool sends one
`Setup`. After the answer to it come `Call`s, which may queue up in the stream. The worker answers
each with a `Began` as each term starts, then `Scored` or `Failed`: in turn, or in any order if a
function is async.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

FailureReason = Literal[
    "raised",
    "timeout",
    "died",
    "not_a_number",
    "not_finite",
    "too_many_processes",
    "too_large",
    "not_loaded",
    "unavailable",
    "breaker_open",
    "refused",
    "denied",
    "garbage",
    "no_score",
]
"""Why a call failed: the function raised, did not return in time, lost its process at every
attempt, returned something else than a number, returned a number that is not finite in float32, or
started too many processes; the call was larger than a frame; the functions could not be loaded
again in a new process. Of functions that ask a server: it answered no attempt, or was not asked
since earlier calls had failed; it refused the request; it refused every request, as with a wrong
key; it sent something else than agreed; a judge's answer has no score."""

UNSCORED: frozenset[FailureReason] = frozenset(
    {"not_loaded", "unavailable", "breaker_open", "denied", "garbage", "no_score"}
)
"""Those that say nothing about the response (docs/decisions/0086). So does a timeout of a function
that waited for something else (`asyncrl.rewards.calls`)."""

Count = Annotated[int, msgspec.Meta(ge=0)]

WHOLE_SUM = -1
"""Stands for the weighted sum where a term's index is expected."""


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
    timeout_seconds: float
    """Longest time for one call of async functions; the pool itself bounds the others."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Score one response."""

    call: int
    """Number of the call, unique within a pool; answers carry it."""
    prompt: str
    response: str
    example: dict[str, Any]


class ServiceUse(msgspec.Struct, frozen=True):
    """What a call used of a server, attempts that failed included."""

    term: int
    """Index of the function."""
    requests: Count
    """Attempts; 0: the breaker was open."""
    retries: dict[str, Count]
    """Attempts that were repeated, by what was wrong with them."""
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """From the beginning of the function to the answer."""
    opened: bool = False
    """Whether its failure opened the breaker."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """Term number `term` starts now. If nothing follows, it is the culprit."""

    call: int
    term: int


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The reward of one response."""

    call: int
    value: float
    """The weighted sum, finite in float32."""
    terms: tuple[float, ...]
    """What each function returned, without its weight."""
    seconds: float
    """Time that scoring took in the worker."""
    uses: tuple[ServiceUse, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A term, or the sum, gave no reward; the worker continues."""

    call: int
    term: int
    """Index of the term, or `WHOLE_SUM`."""
    reason: FailureReason
    message: str
    """What it returned, or the last lines of the user's traceback."""
    uses: tuple[ServiceUse, ...] = ()


ToWorker = Setup | Call
FromWorker = Began | Scored | Failed
