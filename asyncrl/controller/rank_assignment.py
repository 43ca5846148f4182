"""Which rank of the trainer gets which group of a step. Pure.

Groups come one by one, and each goes to the rank that has got the fewest response tokens of its
step so far. So no rank has more than another by more than one group:

    >>> deals = Deals(ranks=2)
    >>> [deals.rank_of(0, step=0, tokens=tokens) for group, tokens in [(0, 900)]]
    [0]
    >>> [deals.rank_of(group, step=0, tokens=tokens) for group, tokens in [(1, 500), (2, 300)]]
    [1, 1]
    >>> deals.rank_of(0, step=0, tokens=100)  # a sample that was lost and regenerated
    0
    >>> deals.by_rank(0, (0, 1, 2))
    [(0,), (1, 2)]
"""

from __future__ import annotations

from collections.abc import Sequence


class Deals:
    """Remembers who got what. A group stays with its rank until its trainer is lost."""

    def __init__(self, ranks: int) -> None:
        self._count = ranks
        self._ranks: dict[int, dict[int, int]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._lineage = 0

    def rank_of(self, group: int, *, step: int, tokens: int, lineage: int = 0) -> int:
        """The rank that a group's samples go to.

        Args:
            group: of the samples.
            step: that trains on it.
            tokens: response tokens of the samples that are delivered now.
            lineage: of the trainer; another one starts with nothing.
        """
        if self._count == 1:
            return 0
        if lineage != self._lineage:
            self._ranks.clear()
            self._tokens.clear()
            self._lineage = lineage
        given = self._tokens.setdefault(step, [0] * self._count)
        ranks = self._ranks.setdefault(step, {})
        rank = ranks.setdefault(group, given.index(min(given)))
        given[rank] += tokens
        return rank

    def by_rank(self, step: int, groups: Sequence[int]) -> list[tuple[int, ...]]:
        """The groups of a step whose membership is final, by rank; forgets earlier steps."""
        if self._count == 1:
            return [tuple(groups)]
        for kept in (self._ranks, self._tokens):
            for old in [key for key in kept if key < step]:
                del kept[old]
        ranks = self._ranks.get(step, {})
        return [
            tuple(group for group in groups if ranks.get(group, 0) == rank)
            for rank in range(self._count)
        ]
