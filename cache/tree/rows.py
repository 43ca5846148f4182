"""The open rows: place in the tree, last tokens, and latest guesses."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from asyncrl.cache.config import CacheConfig, TreeRules
from asyncrl.cache.tree import arena, estimate
from asyncrl.cache.tree.arena import LongArray
from asyncrl.cache.tree.index import hash_of
from asyncrl.rollout.arrays import int32_values
from asyncrl.rollout.trajectory import IntArray


class OpenRows:
    """Row handles, and the arrays in which compiled code keeps the state of each row.

    Args:
        config: length of the shortest match, and of the longest draft.
        rules: match length, and what is doubted at first.
    """

    def __init__(self, config: CacheConfig, rules: TreeRules) -> None:
        self._min_match = config.min_match
        self.cursors: LongArray = np.full((16, arena.CURSOR_WORDS), arena.CLOSED, np.int64)
        """`[R, CURSOR_WORDS]` see `asyncrl.cache.tree.arena`."""
        self.rings: IntArray = np.zeros((16, rules.max_match), np.int32)
        """`[R, max_match]` the last tokens of each row, as a ring; -1 where there are fewer."""
        # A tree makes more guesses than it drafts, and all of them teach something.
        width = 2 * config.draft_tokens + 8
        self.experience = estimate.no_experience(rules.max_match, rules.doubt, 16, width)
        self._free: list[int] = list(range(15, -1, -1))

    def __len__(self) -> int:
        return len(self.cursors) - len(self._free)

    def add(self, tree: int, tail: IntArray) -> int:
        """Open a row.

        Args:
            tree: its tree, or DETACHED.
            tail: `[C]` the last tokens of its context, at most `max_match`.

        Returns:
            the row's handle.
        """
        if not self._free:
            size = len(self.cursors)
            closed = np.full_like(self.cursors, arena.CLOSED)
            self.cursors = np.concatenate([self.cursors, closed])
            self.rings = np.concatenate([self.rings, np.zeros_like(self.rings)])
            self.experience = estimate.more_rows(self.experience)
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        ring = self.rings[row]
        ring[:] = -1
        ring[len(ring) - len(tail) :] = tail
        past = np.ascontiguousarray(ring)
        cursor = self.cursors[row]
        cursor[:] = 0
        cursor[arena.TREE] = tree
        cursor[arena.HASH_SHORT] = hash_of(past, len(past), self._min_match)
        cursor[arena.HASH_LONG] = hash_of(past, len(past), len(past))
        self.experience.waiting[row] = 0
        return row

    def remove(self, row: int) -> tuple[int, int]:
        """Close a row; returns its tree and the name of its sequence.

        Raises:
            ValueError: the row is not open.
        """
        if not 0 <= row < len(self.cursors) or self.cursors[row, arena.TREE] == arena.CLOSED:
            raise ValueError(f"row {row} is not open: closed twice, or never opened")
        tree, own = int(self.cursors[row, arena.TREE]), int(self.cursors[row, arena.OWN])
        self.cursors[row] = arena.CLOSED
        self._free.append(row)
        return tree, own

    def require_open(self, rows: ArrayLike) -> IntArray:
        """`rows` as an int32 vector.

        Raises:
            ValueError: one of them is not open.
        """
        handles = int32_values("rows", rows)
        known = (handles >= 0) & (handles < len(self.cursors))
        if not known.all() or (self.cursors[handles, arena.TREE] == arena.CLOSED).any():
            bad = [
                int(row)
                for row, ok in zip(handles, known, strict=True)
                if not ok or self.cursors[row, arena.TREE] == arena.CLOSED
            ]
            raise ValueError(f"rows {bad} are not open")
        return handles

    def sequences(self) -> list[int]:
        """Names of the sequences that open rows are appending to."""
        own = self.cursors[self.cursors[:, arena.TREE] >= 0, arena.OWN]
        return [int(name) for name in own if name > 0]
