"""One round of held-out evaluation, as a pure ledger: what to ask whom, what came back."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How many held-out samples were right."""

    right: int
    samples: int

    @property
    def value(self) -> float:
        """Share of right samples, 0 to 1; 0 when there were none."""
        return self.right / self.samples if self.samples else 0.0

    @property
    def margin(self) -> float:
        """Half the width of the 95% interval (normal approximation)."""
        if not self.samples:
            return 0.0
        return 1.96 * math.sqrt(self.value * (1 - self.value) / self.samples)


class EvaluationRound:
    """`total` samples spread over generators, each asked for until it came back once."""

    def __init__(self, number: int, total: int, *, threshold: float) -> None:
        self.number = number
        self.total = total
        self._threshold = threshold
        self._waiting = deque(range(total))
        self._asked: dict[int, str] = {}
        self._busy: Counter[str] = Counter()
        self._rewards: dict[int, float] = {}

    @property
    def finished(self) -> int:
        """Samples that came back."""
        return len(self._rewards)

    @property
    def complete(self) -> bool:
        """Whether all came back."""
        return len(self._rewards) == self.total

    def next_for(self, generator: str, slots: int) -> list[int]:
        """Indices to ask of a generator now, so that its slots are full."""
        free = min(slots - self._busy[generator], len(self._waiting))
        chosen = [self._waiting.popleft() for _ in range(free)]
        self._asked.update(dict.fromkeys(chosen, generator))
        self._busy[generator] += len(chosen)
        return chosen

    def came_back(self, index: int, reward: float) -> None:
        """A sample came back; a second time changes nothing."""
        asked = self._asked.pop(index, None)
        if asked is not None:
            self._busy[asked] -= 1
        self._rewards.setdefault(index, reward)

    def again(self, index: int) -> None:
        """A sample came back that does not count (drawn under older weights): ask once more."""
        asked = self._asked.pop(index, None)
        if asked is not None:
            self._busy[asked] -= 1
            self._waiting.append(index)

    def lost(self, generator: str) -> None:
        """A generator is gone: what it was asked for is asked again elsewhere."""
        for index in [i for i, asked in self._asked.items() if asked == generator]:
            del self._asked[index]
            self._waiting.append(index)
        del self._busy[generator]

    def accuracy(self) -> Accuracy:
        """The outcome so far."""
        right = sum(reward > self._threshold for reward in self._rewards.values())
        return Accuracy(right, len(self._rewards))
