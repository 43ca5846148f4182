"""Messages between the pool and a worker process: frames on the worker's standard streams.

The pool sends one `Setup` and, after the answer, `Call`s, which may queue up in the stream. The
worker sends a `Began` as each term of a call starts, then `Scored` or `Failed`: in order, or in any
order if a function is async.
"""

from typing import Annotated, Any, Literal

import msgspec

FailureReason = Literal[
    "raised", "timeout", "died", "not_a_number", "not_finite", "too_many_processes", "too_large",
    "not_loaded", "unavailable", "breaker_open", "refused", "denied", "garbage", "no_score",
]  # fmt: skip
"""The reason of a failure: the function raised, did not return in time, lost its process at every
attempt, did not return a number, returned one that is not finite in float32, or started too many
processes; the call exceeded a frame; the functions could not be loaded again in a new process. With
a server: it answered no attempt; calls were suspended after earlier failures; it refused this
request; it refuses every request, as with a wrong key; its answer was malformed; a judge's answer
has no score. docs/rewards.md lists them."""

UNSCORED: frozenset[FailureReason] = frozenset(
    {"not_loaded", "unavailable", "breaker_open", "denied", "garbage", "no_score"}
)
"""Failures that do not depend on the response (docs/decisions/0086), like a timeout of a function
that waited for a service (`asyncrl.rewards.calls`)."""

Count = Annotated[int, msgspec.Meta(ge=0)]

WHOLE_SUM = -1
"""The index that stands for the weighted sum."""


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
    """Longest time for one call of async functions; the pool itself bounds sync ones."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Score one response."""

    call: int
    """Number of the call, unique within a pool; answers carry it."""
    prompt: str
    response: str
    example: dict[str, Any]


class ServiceUse(msgspec.Struct, frozen=True):
    """A call's use of a server, including failed attempts."""

    term: int
    requests: Count
    """Number of attempts; 0: the breaker was open."""
    retries: dict[str, Count]
    """Number of repeated attempts by cause."""
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """Time from the function's beginning to the answer."""
    opened: bool = False
    """The failure of this call opened the breaker."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """Term number `term` starts now. If no message follows, it is the culprit."""

    call: int
    term: int


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The reward of one response."""

    call: int
    value: float
    """The weighted sum, finite in float32."""
    terms: tuple[float | None, ...]
    """The functions' values, without weights; None: the function does not apply."""
    seconds: float
    """Time of scoring in the worker."""
    uses: tuple[ServiceUse, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A term, or the sum, did not give a reward; the worker continues."""

    call: int
    term: int
    """Index of the term, or `WHOLE_SUM`."""
    reason: FailureReason
    message: str
    """The invalid value, or the last lines of the user's traceback."""
    uses: tuple[ServiceUse, ...] = ()


ToWorker = Setup | Call
FromWorker = Began | Scored | Failed
