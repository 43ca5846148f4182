"""One evaluation round: its samples, their assignment to generators, and the estimates.

>>> plan = EvaluationPlan((PlannedSet("held_out", 2, 1), PlannedSet("hard", 1, 3)))
>>> [plan.place(index) for index in range(plan.total)]
[('held_out', 0), ('held_out', 1), ('hard', 0), ('hard', 0), ('hard', 0)]
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.wire.records.evaluations import (
    HELD_OUT,
    EvaluationRecord,
    SetEvaluation,
    Verdict,
    When,
)

SHOWN = 4
"""Prompts per set with a sample recorded for display: the first ones, to compare rounds."""


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """One held-out set as it is evaluated."""

    name: str
    prompts: int
    samples: int

    @property
    def total(self) -> int:
        """Samples of all prompts."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The samples of an evaluation, numbered set by set and prompt by prompt."""

    sets: tuple[PlannedSet, ...]

    @property
    def total(self) -> int:
        """Samples of all sets."""
        return sum(one.total for one in self.sets)

    def place(self, index: int) -> tuple[str, int]:
        """Return (set, prompt of the set) of a sample. Raises IndexError if it does not exist."""
        name, prompt, _ = self._find(index)
        return name, prompt

    def shown_of(self, index: int) -> str:
        """Return the set of a sample that is recorded for display, chosen by number; else ""."""
        name, prompt, sample = self._find(index)
        return name if prompt < SHOWN and sample == 0 else ""

    def _find(self, index: int) -> tuple[str, int, int]:
        left = index
        for one in self.sets:
            if left < one.total:
                return one.name, *divmod(left, one.samples)
            left -= one.total
        raise IndexError(f"sample {index} of an evaluation with {self.total}")


def plan_of(config: EvaluationConfig, available: Mapping[str, int]) -> EvaluationPlan:
    """Plan the samples of an evaluation from the number of prompts available in each set."""
    planned = []
    for name, prompts in available.items():
        own = config if name == HELD_OUT else config.sets[name]
        most = config.prompts if own.prompts is None else own.prompts
        samples = config.samples if own.samples is None else own.samples
        planned.append(PlannedSet(name, min(most, prompts), samples))
    return EvaluationPlan(tuple(one for one in planned if one.total))


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Estimate, without bias, the probability that one of k samples of a prompt is right.

    1 − C(n − c, k) / C(n, k) of n samples, c of them right (2107.03374, equation 1). Raises
    ValueError if k is not between 1 and n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} samples of a prompt")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def ks_of(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: powers of two, and the number of samples."""
    powers = [1 << shift for shift in range(samples.bit_length())]
    return sorted({*powers, samples} if samples else set())


def estimate(
    rewards: ArrayLike,
    *,
    threshold: float,
    lengths: ArrayLike | None = None,
    verdicts: ArrayLike | None = None,
    max_unscored_share: float = 0.0,
    temperature: float | None = None,
) -> SetEvaluation:
    """Estimate one set from `rewards` `[P, n]` of n samples of each of P prompts.

    A sample is right if its reward is above `threshold`. Unscored samples (`verdicts` `[P, n]`) are
    left out; so is a prompt without any other, and one with fewer than k from pass@k. Estimates are
    None if the share of unscored samples exceeds `max_unscored_share`, or if every reward has
    failed. `lengths` `[P, n]` are response tokens.
    """
    values = np.atleast_2d(np.asarray(rewards, dtype=np.float64))
    prompts, samples = values.shape if values.size else (0, 0)
    if not prompts:
        return SetEvaluation(prompts=0, samples=0, accuracy=None)
    known = np.full((prompts, samples), "scored") if verdicts is None else np.array(verdicts)
    counted = known != "unscored"
    found = SetEvaluation(
        prompts=prompts, samples=int(counted.sum()), unscored=int((~counted).sum()),
        failed=int((known == "failed").sum()), accuracy=None, temperature=temperature,
        tokens=0.0 if lengths is None else float(np.mean(np.asarray(lengths, dtype=np.float64))),
    )  # fmt: skip
    if found.unscored > max_unscored_share * known.size or not (known == "scored").any():
        return found
    right = values > threshold
    accuracies, mean_rewards = _by_prompt(right, counted), _by_prompt(values, counted)
    of_prompts = list(zip((right & counted).sum(axis=1), counted.sum(axis=1), strict=True))
    passes = {
        k: np.array([pass_at_k(int(c), int(n), k) for c, n in of_prompts if n >= k])
        for k in ks_of(samples)
    }
    errors = {k: _error(each) for k, each in passes.items()}
    return msgspec.structs.replace(
        found,
        accuracy=float(accuracies.mean() if found.unscored else right.mean()),
        accuracy_error=_error(accuracies),
        reward=float(mean_rewards.mean() if found.unscored else values.mean()),
        reward_error=_error(mean_rewards),
        pass_at={k: float(each.mean()) for k, each in passes.items() if len(each)},
        pass_at_error={k: error for k, error in errors.items() if error is not None},
    )


def _by_prompt(values: NDArray[Any], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Average each prompt's counted samples; prompts without any are left out."""
    kept = counted.any(axis=1)
    means: NDArray[np.float64] = values[kept].mean(axis=1, where=counted[kept])
    return means


def _error(per_prompt: NDArray[np.float64]) -> float | None:
    if len(per_prompt) < 2:
        return None
    return float(per_prompt.std(ddof=1) / math.sqrt(len(per_prompt)))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out accuracy in the run's state and result."""

    value: float | None
    """Share of right samples, 0 to 1; None without samples, or if too many are unscored."""
    samples: int
    reward: float | None = None
    """Mean reward, if it says more than the accuracy."""

    @classmethod
    def of(cls, record: EvaluationRecord) -> Accuracy:
        """Return the accuracy of the first set."""
        if (main := record.main) is None:
            return cls(None, 0)
        return cls(main.accuracy, main.samples, main.graded_reward)


class _Result(NamedTuple):
    reward: float
    tokens: int
    verdict: Verdict


class EvaluationRound:
    """Spreads the samples of a round over generators and collects each of them once.

    `number` identifies the round, so that late answers of other rounds are recognised. `version` is
    the policy version in a run that trains at the same time, otherwise None.
    """

    def __init__(
        self,
        number: int,
        plan: EvaluationPlan,
        config: EvaluationConfig,
        version: int | None = None,
    ) -> None:
        self.number = number
        self.version = version
        self.plan = plan
        self._config = config
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
        """Number of samples that came back."""
        return len(self._results)

    @property
    def complete(self) -> bool:
        """True if every sample came back."""
        return self.finished == self.total

    def describe(self) -> str:
        """Return the progress: `step 40, 120/256`."""
        step = "" if self.version is None else f"step {self.version}, "
        return f"{step}{self.finished}/{self.total}"

    def next_for(self, generator: str, slots: int) -> list[int]:
        """Assign waiting samples to a generator until its slots are full; return their indices."""
        return self.deal(generator, max(0, slots - self._busy[generator]))

    @property
    def waiting(self) -> int:
        """Number of unassigned samples."""
        return len(self._waiting)

    def deal(self, generator: str, count: int) -> list[int]:
        """Assign up to `count` waiting samples to a generator; return their indices."""
        chosen = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._assigned.update(dict.fromkeys(chosen, generator))
        self._busy[generator] += len(chosen)
        return chosen

    def generator_of(self, index: int) -> str | None:
        """Return the generator of a sample; None if it came back, waits, or does not exist."""
        return self._assigned.get(index)

    def came_back(
        self, index: int, reward: float, tokens: int = 0, verdict: Verdict = "scored"
    ) -> None:
        """Record a sample's result. Later copies of it do not change anything."""
        self._take_from_generator(index)
        self._results.setdefault(index, _Result(reward, tokens, verdict))

    def again(self, index: int) -> None:
        """Reassign a sample that came back with weights that are too old."""
        if self._take_from_generator(index):
            self._waiting.append(index)

    def _take_from_generator(self, index: int) -> bool:
        generator = self._assigned.pop(index, None)
        if generator is not None:
            self._busy[generator] -= 1
        return generator is not None

    def lost(self, generator: str) -> None:
        """Unassign the samples of a lost generator."""
        for index in [i for i, name in self._assigned.items() if name == generator]:
            del self._assigned[index]
            self._waiting.append(index)
        del self._busy[generator]

    def record(self, step: int, when: When, *, held_seconds: float = 0.0) -> EvaluationRecord:
        """Return the result of the complete round, for the policy of this version."""
        now, seconds = time.time(), time.monotonic() - self._began  # noqa: TID251 - for its record
        return EvaluationRecord(
            step=step, time=now, when=when, seconds=seconds, held_seconds=held_seconds,
            sets=self._estimates(),
        )  # fmt: skip

    def _estimates(self) -> dict[str, SetEvaluation]:
        found, config = dict[str, SetEvaluation](), self._config
        results = iter(self._results[index] for index in range(self.total))
        for one in self.plan.sets:
            own, shape = list(itertools.islice(results, one.total)), (one.prompts, one.samples)
            rewards, lengths, verdicts = (np.reshape([r[i] for r in own], shape) for i in range(3))
            found[one.name] = estimate(
                rewards, threshold=config.threshold, lengths=lengths, verdicts=verdicts,
                max_unscored_share=config.max_unscored_share, temperature=config.temperature,
            )  # fmt: skip
        return found
