"""The bookkeeping of one evaluation round: which generator has which sample, and the rewards."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The result of a round of held-out samples."""

    right: int
    """Samples whose reward was above the threshold."""
    samples: int

    @property
    def value(self) -> float:
        """Share of right samples, 0 to 1; 0 without samples."""
        return self.right / self.samples if self.samples else 0.0

    @property
    def margin(self) -> float:
        """Half the width of the 95% interval (normal approximation)."""
        if not self.samples:
            return 0.0
        return 1.96 * math.sqrt(self.value * (1 - self.value) / self.samples)


class EvaluationRound:
    """Spreads the samples of a round over generators and collects each of them once.

    Args:
        number: of the round in its run; late answers of another round carry another number.
        total: samples of the round. Their indices are 0 to total - 1.
        threshold: a sample is right if its reward is above this.
    """

    def __init__(self, number: int, total: int, *, threshold: float) -> None:
        self.number = number
        self.total = total
        self._threshold = threshold
        self._waiting = deque(range(total))
        self._assigned: dict[int, str] = {}
        self._busy: Counter[str] = Counter()
        self._rewards: dict[int, float] = {}

    @property
    def finished(self) -> int:
        """How many samples came back."""
        return len(self._rewards)

    @property
    def complete(self) -> bool:
        """Whether every sample came back."""
        return len(self._rewards) == self.total

    def next_for(self, generator: str, slots: int) -> list[int]:
        """Assign waiting samples to a generator until its slots are full; returns their indices."""
        free = min(slots - self._busy[generator], len(self._waiting))
        chosen = [self._waiting.popleft() for _ in range(free)]
        self._assigned.update(dict.fromkeys(chosen, generator))
        self._busy[generator] += len(chosen)
        return chosen

    def generator_of(self, index: int) -> str | None:
        """The generator that a sample is assigned to; None if it came back, waits, or is none."""
        return self._assigned.get(index)

    def came_back(self, index: int, reward: float) -> None:
        """A sample came back. Later copies of it change nothing."""
        generator = self._assigned.pop(index, None)
        if generator is not None:
            self._busy[generator] -= 1
        self._rewards.setdefault(index, reward)

    def again(self, index: int) -> None:
        """A sample came back that does not count, as its weights are too old: assign it again."""
        generator = self._assigned.pop(index, None)
        if generator is not None:
            self._busy[generator] -= 1
            self._waiting.append(index)

    def lost(self, generator: str) -> None:
        """A generator is gone: its samples wait for another one."""
        for index in [i for i, name in self._assigned.items() if name == generator]:
            del self._assigned[index]
            self._waiting.append(index)
        del self._busy[generator]

    def accuracy(self) -> Accuracy:
        """The accuracy over the samples that came back."""
        right = sum(reward > self._threshold for reward in self._rewards.values())
        return Accuracy(right, len(self._rewards))
