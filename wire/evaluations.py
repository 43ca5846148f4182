"""What an evaluation came to: a line of evaluations.jsonl, and what everybody shows of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from wire.decoding import Amount, Count
from wire.records import Measured

HELD_OUT = "held_out"
"""Name of the task's own held-out examples; the sets of `evaluation.sets` have others."""

When = Literal["before", "during", "after"]
"""`before` and `after` training, or `during` (`evaluation.every`)."""

Z95 = 1.96
"""Half the width of a 95% interval, in standard errors."""


class SetEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The estimates of one held-out set.

    Standard errors are over prompts: samples of one prompt are alike, and more of them do not stand
    for more prompts. None where there are fewer than two prompts.
    """

    prompts: Count
    samples: Count
    """Of all prompts together."""
    accuracy: float
    """Share of samples whose reward is above `evaluation.threshold`, 0 to 1."""
    accuracy_error: Measured = None
    """Standard error of `accuracy`."""
    reward: float = 0.0
    """Mean reward."""
    reward_error: Measured = None
    """Standard error of `reward`."""
    pass_at: dict[int, float] = {}
    """For k: probability that at least one of k samples of a prompt is right, mean over prompts,
    by the unbiased estimator 1 − C(n − c, k) / C(n, k) (2107.03374, equation 1)."""
    pass_at_error: dict[int, float] = {}
    """Standard errors of `pass_at`."""
    tokens: float = 0.0
    """Mean response length in tokens."""

    @property
    def margin(self) -> float:
        """Half the width of the 95% interval of `accuracy`; 0 where it is not known."""
        return Z95 * (self.accuracy_error or 0.0)


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: every sample was drawn from the policy of one version."""

    step: Count
    """The policy version: steps trained when it was published."""
    time: float
    """Unix time of its end, in seconds."""
    when: When
    seconds: Amount = 0.0
    """From the first request to the last sample. Other work was done meanwhile, if `during`."""
    held_seconds: Amount = 0.0
    """Of a `during` evaluation: the longest time for which a generator kept its version because
    held-out samples were unfinished, while the next weights were there."""
    sets: dict[str, SetEvaluation] = {}
    """By name, the most important first: `held_out`, then `evaluation.sets`."""

    @property
    def main(self) -> SetEvaluation | None:
        """Of the first set; None if there is no held-out prompt."""
        return next(iter(self.sets.values()), None)


def accuracy_of(record: EvaluationRecord | None) -> float | None:
    """The accuracy of a record's first set; None without one."""
    main = None if record is None else record.main
    return None if main is None else main.accuracy
