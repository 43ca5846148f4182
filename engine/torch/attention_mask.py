"""The keys that each token of a forward pass attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import IntArray

BoolArray = NDArray[np.bool_]
Hidden = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Row, query and key of masked pairs among a row's new tokens, both counted from its first one."""


@dataclass(frozen=True, slots=True)
class AttendedKeys:
    """The keys of each of T packed tokens: `first` to `last` of its slot but the hidden ones."""

    slot: NDArray[np.int64]
    """`[T]`"""
    first: NDArray[np.int64]
    """`[T]`"""
    last: NDArray[np.int64]
    """`[T]` the token's place."""
    base: NDArray[np.int64]
    """`[T]` place of its row's first new token; column 0 of `hidden`."""
    hidden: NDArray[np.bool_]
    """`[T, Q]` new tokens of its row on other paths of its tree; `[T, 0]`: none."""
    packed: bool
    """True if the keys are the packed tokens themselves, as one slot; otherwise those of slots."""

    @classmethod
    def over_slots(
        cls,
        slot: NDArray[np.int64],
        place: NDArray[np.int64],
        lengths: IntArray,
        counts: IntArray,
        pairs: Hidden | None,
    ) -> AttendedKeys:
        """Let a step's tokens see the keys of their slots up to their own places, `[T]` each.

        Rows that decode come first, with `lengths` `[m]` valid keys and `counts` `[m]` new tokens;
        `pairs` are hidden among these; None: nothing.
        """
        base = np.zeros_like(place)
        hidden = np.zeros((len(place), 0), np.bool_)
        if pairs is not None and len(pairs[0]):
            row, query, key = pairs
            base[: int(counts.sum())] = np.repeat(lengths, counts)
            hidden = np.zeros((len(place), int(counts.max())), np.bool_)
            hidden[(np.cumsum(counts) - counts)[row] + query, key] = True
        return cls(slot, np.zeros_like(place), place, base, hidden, packed=False)

    @classmethod
    def within(cls, lengths: NDArray[np.integer]) -> AttendedKeys:
        """Pack whole contexts of `[r]` lengths one after another, without slots."""
        tokens = np.arange(int(lengths.sum()))
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int64)
        hidden = np.zeros((len(tokens), 0), np.bool_)
        return cls(np.zeros_like(tokens), starts, tokens, starts, hidden, packed=True)

    def within_window(self, positions: NDArray[np.int64], window: int) -> AttendedKeys:
        """Drop keys `window` or more positions before their token; `positions` are `[T]`."""
        oldest = positions - (window - 1)
        first, hidden = np.maximum(self.first, self.first + oldest), self.hidden
        in_tree = np.flatnonzero(self.base > 0) if hidden.shape[1] else np.empty(0, np.int64)
        if len(in_tree):
            # Places are positions up to `base` only. After it, old keys are hidden.
            first[in_tree] = np.clip(oldest[in_tree], 0, self.base[in_tree])
            row = in_tree - (self.last[in_tree] - self.base[in_tree])
            columns = np.minimum(row[:, None] + np.arange(hidden.shape[1]), len(positions) - 1)
            hidden = hidden.copy()
            hidden[in_tree] |= positions[columns] < oldest[in_tree, None]
        return replace(self, first=first, hidden=hidden)
