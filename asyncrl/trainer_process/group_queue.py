"""The trainer's queue: gathers trajectories into groups, by step. No sockets, no clock.

Each trajectory is returned at most once, even if it arrives twice.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from asyncrl.rollout.trajectory import FloatArray, SampleId, Trajectory
from asyncrl.wire.messages.data import TrajectoryDelivery


class WholeGroup(NamedTuple):
    """A group with all its samples, in the order of their indices."""

    group: int
    trajectories: list[Trajectory]
    rewards: FloatArray
    generators: list[str]
    terms: list[tuple[float | None, ...]]
    """Results of the reward functions for each sample; empty for a failed reward."""


class _Arrival(NamedTuple):
    generator: str
    delivery: TrajectoryDelivery
    trajectory: Trajectory


class GroupQueue:
    """Groups of `group_size` trajectories. Each whole group is returned once."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.duplicates = 0
        self._partial: dict[int, dict[int, _Arrival]] = {}
        self._whole: dict[int, dict[int, dict[int, _Arrival]]] = {}
        self._taken: dict[int, set[int]] = {}

    @property
    def trajectories(self) -> int:
        """Trajectories held."""
        partial = sum(len(samples) for samples in self._partial.values())
        return partial + self.group_size * sum(len(groups) for groups in self._whole.values())

    def knows(self, sample: SampleId, *, step: int, next_step: int) -> bool:
        """Return True if a sample of this step was queued before, or its step is past."""
        group = sample.group
        return (
            step < next_step
            or group in self._taken.get(step, ())
            or group in self._whole.get(step, ())
            or sample.sample in self._partial.get(group, ())
        )

    def add(
        self,
        delivery: TrajectoryDelivery,
        trajectory: Trajectory,
        *,
        generator: str,
        next_step: int,
    ) -> bool:
        """Queue a delivery; return False if it is a duplicate or its step is before `next_step`.

        Raises ValueError if the sample index is outside the group.
        """
        group, sample = delivery.sample.group, delivery.sample.sample
        if not 0 <= sample < self.group_size:
            raise ValueError(f"sample {sample} is outside a group of {self.group_size}")
        if self.knows(delivery.sample, step=delivery.step, next_step=next_step):
            self.duplicates += 1
            return False
        samples = self._partial.setdefault(group, {})
        samples[sample] = _Arrival(generator, delivery, trajectory)
        if len(samples) == self.group_size:
            self._whole.setdefault(delivery.step, {})[group] = self._partial.pop(group)
        return True

    def take(
        self, step: int, *, allowed: Collection[int] | None, tokens: int = 0
    ) -> list[WholeGroup]:
        """Take whole groups of this step until they have this many tokens; at least one if any.

        `allowed` limits the choice.
        """
        taken: list[WholeGroup] = []
        groups = self._whole.get(step, {})
        held = 0
        for group in [one for one in groups if allowed is None or one in allowed]:
            if taken and held >= tokens:
                break
            samples = [one for _, one in sorted(groups.pop(group).items())]
            self._taken.setdefault(step, set()).add(group)
            taken.append(
                WholeGroup(
                    group,
                    [arrival.trajectory for arrival in samples],
                    np.array([arrival.delivery.reward for arrival in samples], np.float32),
                    [arrival.generator for arrival in samples],
                    [arrival.delivery.terms for arrival in samples],
                )
            )
            held += sum(len(one.prompt_tokens) + len(one.tokens) for one in taken[-1].trajectories)
        return taken

    def forget_before(self, step: int) -> None:
        """Drop leftover samples of earlier steps, whose groups failed."""
        for kept in (self._whole, self._taken):
            for old in [key for key in kept if key < step]:
                del kept[old]
        for group, samples in list(self._partial.items()):
            if next(iter(samples.values())).delivery.step < step:
                del self._partial[group]
