"""The numbers that leave one process and reach a user: one typed record each, on its whole way.

The engine fills an `EngineStats`, the generator adds what it counts itself and puts it into its
report, and the controller adds up the reports of all generators. Nobody copies single counters:

    >>> yesterday, today = TokenCounts(generated=100, drafted=40), TokenCounts(generated=30)
    >>> (yesterday + today).generated
    130
    >>> yesterday + today - yesterday == today
    True
"""

from __future__ import annotations

from typing import Self

import msgspec


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counts of response tokens, by what happened to them. Counts add and subtract."""

    generated: int = 0
    """Drawn by an engine, accepted drafts included. Tokens that verification accepted are not
    drawn, so they are not counted here."""
    drafted: int = 0
    """Proposed to the engine by the cache."""
    accepted: int = 0
    """Drafted tokens that the engine accepted."""
    verified: int = 0
    """Tokens of an older policy version that verification accepted."""
    rejected: int = 0
    """Tokens of an older policy version that verification rejected; they are regenerated."""
    outside_top_k: int = 0
    """Tokens that are not among the top K stored with them."""

    def __add__(self, other: Self) -> Self:
        """The sum, count by count."""
        return type(self)(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )

    def __sub__(self, other: Self) -> Self:
        """What was counted since `other`."""
        return type(self)(
            **{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__}
        )


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's counters since its start, and its gauges as of now."""

    tokens: TokenCounts = TokenCounts()
    """The engine itself counts `generated`, `drafted` and `accepted`; the generator adds the
    rest before it reports them."""
    steps: int = 0
    """Forward passes of the decoding loop."""
    busy_seconds: float = 0.0
    """Time inside these passes."""
    running: int = 0
    """Requests that hold a slot now."""
    waiting: int = 0
    """Requests that wait for a slot now."""
    slots: int = 0
    """Requests that can run at once."""
    kv_used: float = 0.0
    """Share of the KV space in use now, 0 to 1."""
    policy_version: int = 0
    """Version of the weights that the engine samples from."""
