"""RLOO, REINFORCE leave-one-out (arXiv 2402.14740, section 2.2), on whole samples.

    A_i  = r_i - mean over j != i of r_j
    loss = -sg(W) * A * sum of log p over the sample,    W = correction of its p / b as a whole

The equations of `asyncrl.trainer.algorithms.reinforce` with the paper's view of a sample as one
action: `loss_normalization: sample`, `correction: sequence_truncated`. So its gradient is unbiased
on-policy, and for stale samples too where no weight reaches `importance_cap`. Empty batch: loss 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.trainer.algorithms.reinforce import Reinforce


@dataclass(frozen=True, slots=True)
class Rloo(Reinforce):
    """`Reinforce` with the defaults that `trainer.base.algorithm_registry` has for `rloo`."""
