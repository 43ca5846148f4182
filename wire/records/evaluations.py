"""The result of an evaluation: a line of evaluations.jsonl, and the numbers shown of it."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from asyncrl.wire.records.step import Measured
from asyncrl.wire.transport.decoding import Amount, Count

HELD_OUT = "held_out"
"""Name of the task's own held-out examples; the sets of `evaluation.sets` have others."""

When = Literal["before", "during", "after"]
"""`before` and `after` training, or `during` (`evaluation.every`)."""

Verdict = Literal["scored", "failed", "unscored"]
"""Outcome of a held-out sample. `failed`: its reward failed and counts as 0, as the sample may have
caused it. `unscored`: the failure says nothing about the policy, such as a server that is down, so
the sample is left out (docs/decisions/0086)."""


def independent_trials(share: float, error: float | None, prompts: int, samples: int) -> float:
    """Number of independent samples that would give this standard error of a share.

    Samples of one prompt are alike, so they count for fewer. If the error says nothing (all right,
    all wrong, one prompt), each prompt counts once.
    """
    if samples <= prompts:
        return float(samples)
    if not error or not 0.0 < share < 1.0:
        return float(prompts)
    return min(float(samples), max(1.0, share * (1.0 - share) / error**2))


def wilson(share: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion, 95% by default. Raises ValueError for 0 trials."""
    if trials < 1:
        raise ValueError("an interval needs at least one trial")
    scale = 1.0 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


class SetEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The estimates of one held-out set; standard errors are over prompts, None below two."""

    prompts: Count
    samples: Count
    """Samples that count, of all prompts together."""
    unscored: Count = 0
    """Further samples, which are left out (`Verdict`)."""
    failed: Count = 0
    """Those of `samples` whose reward failed and counts as 0."""
    accuracy: Measured
    """Share of samples whose reward is above `evaluation.threshold`, 0 to 1, mean over prompts.
    None: the evaluation is incomplete, too many samples are unscored."""
    accuracy_error: Measured = None
    reward: Measured = None
    reward_error: Measured = None
    pass_at: dict[int, float] = {}
    """Probability, by k, that at least one of k samples of a prompt is right, mean over prompts, by
    the unbiased estimator 1 − C(n − c, k) / C(n, k) (2107.03374, equation 1)."""
    pass_at_error: dict[int, float] = {}
    tokens: float = 0.0
    """Mean response length in tokens."""
    loss: Measured = None
    """Mean -log p of a learned token, in nats: the only estimate of supervised fine-tuning."""
    temperature: Measured = None
    """Temperature of the samples if it was not that of training; 0: greedy."""

    @property
    def is_complete(self) -> bool:
        """True if enough samples count for an accuracy."""
        return self.accuracy is not None or self.loss is not None

    @property
    def trials(self) -> float:
        """Independent samples behind the accuracy."""
        error = self.accuracy_error
        return independent_trials(self.accuracy or 0.0, error, self.prompts, self.samples)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of `accuracy`, by Wilson; None if that is unknown or not a share."""
        if self.accuracy is None or not 0.0 <= self.accuracy <= 1.0 or self.trials < 1:
            return None
        return wilson(self.accuracy, self.trials)

    @property
    def graded_reward(self) -> Measured:
        """The mean reward, if it says more than the accuracy."""
        if self.reward is None or self.accuracy is None or abs(self.reward - self.accuracy) < 1e-9:
            return None
        return self.reward


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: every sample was drawn from the policy of one version."""

    step: Count
    """The policy version: steps trained when it was published."""
    time: float
    when: When
    seconds: Amount = 0.0
    """Time from the first request to the last sample; during training other work goes on."""
    held_seconds: Amount = 0.0
    """Longest time for which a generator kept its version because held-out samples were unfinished,
    while the next weights were ready; only if `during`."""
    sets: dict[str, SetEvaluation] = {}
    """Estimates by name, the most important first: `held_out`, then `evaluation.sets`."""

    @property
    def is_complete(self) -> bool:
        """True if every set has an accuracy."""
        return all(one.is_complete for one in self.sets.values())

    @property
    def main(self) -> SetEvaluation | None:
        """Estimates of the first set; None if there is no held-out prompt."""
        return next(iter(self.sets.values()), None)


def accuracy_of(record: EvaluationRecord | None) -> float | None:
    """Return the accuracy of a record's first set; None without one, or if it is incomplete."""
    main = None if record is None else record.main
    return None if main is None else main.accuracy


def graded_reward_of(record: EvaluationRecord | None) -> float | None:
    """Return the mean reward of a record's first set, if it says more than the accuracy."""
    main = None if record is None else record.main
    return None if main is None else main.graded_reward


def newest_of(records: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """Return the record of the newest trained step that has an accuracy, or None."""
    known = [one for one in records if one.step and accuracy_of(one) is not None]
    return max(known, key=lambda one: one.step, default=None)
