"""Assigns samples to forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import Rewards


@dataclass(frozen=True, slots=True)
class Work:
    """B samples to compute, with their training targets."""

    trajectories: list[Trajectory]
    advantages: list[float]
    owners: list[tuple[int, int]]
    """`[B]` index of each sample's group among those added, and its place in the group."""
    is_padding: bool = False
    """True if nothing counts it (`asyncrl.trainer.accumulation`)."""

    def add(self, trajectories: Sequence[Trajectory], advantages: Rewards, group: int) -> None:
        """Add a whole group."""
        self.trajectories.extend(trajectories)
        self.advantages.extend(advantages.tolist())
        self.owners.extend((group, place) for place in range(len(trajectories)))

    def split(self, budget: int) -> Iterator[Work]:
        """Split into micro-batches of at most `budget` tokens, longest samples first.

        In each, samples of a group are adjacent, so that they share their prompt.
        """
        lengths = [len(one.prompt_tokens) + len(one.tokens) for one in self.trajectories]
        for indices in split_by_tokens(lengths, budget):
            ordered = sorted(indices, key=lambda one: self.owners[one][0])
            yield Work(
                [self.trajectories[one] for one in ordered],
                [self.advantages[one] for one in ordered],
                [self.owners[one] for one in ordered],
            )

    def places(self, size: int) -> NDArray[np.int64]:
        """`[B]` place of each sample when whole groups of this size follow one another."""
        return np.array([group * size + place for group, place in self.owners], np.int64)


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences into micro-batches of at most `budget` tokens, by index, longest first.

    A longer sequence gets its own. Deterministic.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[index] > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches
