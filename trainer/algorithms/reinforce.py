"""REINFORCE and RLOO: the leave-one-out baseline (arXiv 2402.14740, section 2.2).

    A_i  = r_i - mean over j != i of r_j  =  (r_i - mean(r)) * G / (G - 1)
    loss = -sg(w) * A * log p,    w = correction of p / b, by default min(p / b, cap)

What its gradient estimates depends on the denominator and, for stale tokens, on the correction:

- on-policy it is unbiased with `loss_normalization: sample` only. `token`, the default, divides by
  the step's tokens, which depend on what was drawn; `sequence` gives short samples more weight.
- stale tokens need the weight of the whole sample (`correction: sequence_truncated`), and it is
  unbiased where no weight reaches the cap. A token's own weight ignores its prefix's probability.

`rloo` is the same with unbiased defaults, `loss_normalization: sample` and `correction:
sequence_truncated`: the paper's view of a sample as one action,

    loss = -sg(W) * A * sum of log p over the sample,    W = correction of its p / b as a whole

docs/algorithms.md has the size of each bias on a small policy. `advantage_normalization` and
`clip_ratio_*` have no effect. A group of one sample is refused. Empty batch: loss 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from asyncrl.trainer.algorithms.base import LossSums, Rewards, Signal, TokenBatch, leave_one_out
from asyncrl.trainer.algorithms.losses import importance, weighted_logprobs
from asyncrl.trainer.base.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Reinforce:
    """Leave-one-out advantages and the importance-weighted score function."""

    signals: ClassVar[Mapping[str, Signal]] = {}
    needs_reference: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """Create it; it reads no settings."""
        del config
        return cls()

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` leave-one-out advantages. Raises ValueError if G < 2."""
        return leave_one_out(rewards)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equation."""
        return LossSums(weighted_logprobs(batch, importance(batch)))


@dataclass(frozen=True, slots=True)
class Rloo(Reinforce):
    """`Reinforce` with the defaults that `trainer.base.algorithm_registry` has for `rloo`."""
