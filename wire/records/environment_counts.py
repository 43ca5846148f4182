"""Counts of generators' environments."""

from __future__ import annotations

from typing import Self

import msgspec

from asyncrl.wire.transport.decoding import Amount, Count


class EnvironmentCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of generators' environments. Those of several processes add."""

    turns: Count = 0
    """Answered turns, replayed ones included."""
    seconds: Amount = 0.0
    """Time until they were answered, summed over all samples."""
    replayed: Count = 0
    """Environments that were made again and replayed the accepted turns, because verification had
    changed a later turn or their process had ended."""
    restored: Count = 0
    """Environments that went back to before a turn by `restore`."""
    started_over: Count = 0
    """Samples that began again because their environment cannot go back."""
    lost: Count = 0
    """Samples that started over because their worker process had ended."""
    hanging: Count = 0
    """Hanging threads of environments and agents that were left behind."""
    replaced_workers: Count = 0
    """Worker processes that ended, or were ended, and were replaced."""

    calls: Count = 0
    """Tool calls in turns."""
    wrong_calls: Count = 0
    """Tool calls that could not be read, named no tool or had wrong arguments."""

    @property
    def mean_seconds(self) -> float | None:
        """Mean time until a turn is answered; None without turns."""
        return self.seconds / self.turns if self.turns else None

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )
