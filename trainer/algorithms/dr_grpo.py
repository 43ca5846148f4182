"""Dr. GRPO (arXiv 2503.20783, section 3.2 and eq. 3): GRPO without its two biases.

    A_i  = r_i - mean(r)                 no division by the group's standard deviation
    loss = sum over a sample's tokens    no division by its length

The denominator of the paper is samples times a constant, the longest response; with
`loss_normalization: sample`, its default here, it is the samples, and the constant belongs to the
learning rate (AdamW ignores it). The loss of a token is GRPO's (`asyncrl.trainer.algorithms.grpo`).
On-policy the gradient is (G - 1) / G times an unbiased one. Empty batch: loss 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.trainer.algorithms.grpo import Grpo


@dataclass(frozen=True, slots=True)
class DrGrpo(Grpo):
    """GRPO, for which `asyncrl.trainer.base.config` refuses `advantage_normalization: std`."""
