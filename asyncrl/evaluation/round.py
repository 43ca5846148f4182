"""The bookkeeping of one evaluation round: which generator has which sample, and the rewards."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from asyncrl.evaluation.estimates import estimate
from asyncrl.evaluation.plan import EvaluationPlan
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation, Verdict, When

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out accuracy as the run's state and its result have it."""

    value: float | None
    """Share of right samples, 0 to 1; None without samples, or if too many are unscored."""
    samples: int
    margin: float = 0.0
    """Half the width of the 95% interval; 0 where it is not known."""

    @classmethod
    def of(cls, record: EvaluationRecord) -> Accuracy:
        """That of the first set."""
        main = record.main
        return cls(None, 0) if main is None else cls(main.accuracy, main.samples, main.margin)


class _Result(NamedTuple):
    """Of one sample."""

    reward: float
    tokens: int
    """Of the response."""
    verdict: Verdict


class EvaluationRound:
    """Spreads the samples of a round over generators and collects each of them once.

    Args:
        number: of the round in its process; late answers of another round carry another number.
        plan: its samples.
        threshold: a sample is right if its reward is above this.
        max_unscored_share: of a set's samples; with more it has no accuracy.
        version: the policy version, in a run that trains meanwhile; None: the run does nothing
            else.
    """

    def __init__(
        self,
        number: int,
        plan: EvaluationPlan,
        *,
        threshold: float,
        max_unscored_share: float = 0.0,
        version: int | None = None,
    ) -> None:
        self.number = number
        self.version = version
        self.plan = plan
        self._threshold = threshold
        self._max_unscored_share = max_unscored_share
        self._waiting = deque(range(plan.total))
        self._assigned: dict[int, str] = {}
        self._busy: Counter[str] = Counter()
        self._results: dict[int, _Result] = {}
        self._began = time.monotonic()

    @property
    def total(self) -> int:
        """Samples of the round. Their indices are 0 to total - 1."""
        return self.plan.total

    @property
    def finished(self) -> int:
        """How many samples came back."""
        return len(self._results)

    @property
    def complete(self) -> bool:
        """Whether every sample came back."""
        return len(self._results) == self.total

    def describe(self) -> str:
        """`step 40, 120/256`."""
        step = "" if self.version is None else f"step {self.version}, "
        return f"{step}{self.finished}/{self.total}"

    def next_for(self, generator: str, slots: int) -> list[int]:
        """Assign waiting samples to a generator until its slots are full; returns their indices."""
        return self.deal(generator, max(0, slots - self._busy[generator]))

    @property
    def waiting(self) -> int:
        """Samples that no generator has."""
        return len(self._waiting)

    def deal(self, generator: str, count: int) -> list[int]:
        """Assign up to this many waiting samples to a generator; returns their indices."""
        chosen = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._assigned.update(dict.fromkeys(chosen, generator))
        self._busy[generator] += len(chosen)
        return chosen

    def generator_of(self, index: int) -> str | None:
        """The generator that a sample is assigned to; None if it came back, waits, or is none."""
        return self._assigned.get(index)

    def came_back(
        self, index: int, reward: float, tokens: int = 0, verdict: Verdict = "scored"
    ) -> None:
        """A sample came back. Later copies of it change nothing."""
        self._take_from_generator(index)
        self._results.setdefault(index, _Result(reward, tokens, verdict))

    def again(self, index: int) -> None:
        """A sample came back that does not count, as its weights are too old: assign it again."""
        if self._take_from_generator(index):
            self._waiting.append(index)

    def _take_from_generator(self, index: int) -> bool:
        generator = self._assigned.pop(index, None)
        if generator is not None:
            self._busy[generator] -= 1
        return generator is not None

    def lost(self, generator: str) -> None:
        """A generator is gone: its samples wait for another one."""
        for index in [i for i, name in self._assigned.items() if name == generator]:
            del self._assigned[index]
            self._waiting.append(index)
        del self._busy[generator]

    def record(self, step: int, when: When, *, held_seconds: float = 0.0) -> EvaluationRecord:
        """What the complete round came to, for the policy of this version."""
        return EvaluationRecord(
            step=step,
            time=time.time(),  # noqa: TID251 - for its record
            when=when,
            seconds=time.monotonic() - self._began,
            held_seconds=held_seconds,
            sets=self._estimates(),
        )

    def _estimates(self) -> dict[str, SetEvaluation]:
        found: dict[str, SetEvaluation] = {}
        first = 0
        for one in self.plan.sets:
            results = [self._results[index] for index in range(first, first + one.total)]
            shape = one.prompts, one.samples
            found[one.name] = estimate(
                _rows([result.reward for result in results], shape),
                threshold=self._threshold,
                lengths=_rows([result.tokens for result in results], shape),
                verdicts=_rows([result.verdict for result in results], shape),
                max_unscored_share=self._max_unscored_share,
            )
            first += one.total
        return found


def _rows(values: list[T], shape: tuple[int, int]) -> list[list[T]]:
    """`[P, n]` of the values of P prompts in order."""
    prompts, samples = shape
    return [list(values[row * samples : (row + 1) * samples]) for row in range(prompts)]
