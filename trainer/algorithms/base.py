"""What an algorithm is: two pure functions, the tensors they take, and the signals they report.

Shapes: G samples in a group; N response tokens of one micro-batch, packed one after another.

An algorithm never divides. `loss` returns **sums**, and the learner divides by the step's loss
denominator, which is known only when the step's last group has arrived:

- `loss_normalization: token`: every weight is 1, denominator = response tokens of the step
  (DAPO, arXiv 2503.14476, eq. 8);
- `loss_normalization: sequence`: weights are 1 / L of their sample, denominator = samples of the
  step (GRPO, arXiv 2402.03300, eq. 3).

Groups whose advantages are all 0 count in both denominators, whether they are computed or not.
An empty batch (N = 0) has loss 0 and all sums 0; the learner does not run the model for it.

Signals are what an algorithm measures of its own: the share of clipped tokens, a penalty. It
declares each once in `signals` and returns its sum with every loss. A signal's value of a step is
found under its name in `algorithm` of metrics.jsonl, in `asyncrl_algorithm_signal{signal}` and in
the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rewards = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N response tokens, as a loss takes them. All tensors are float and on one device."""

    logprobs: Tensor
    """`[N]` under the current policy (processed distribution); carries the gradient."""
    behaviour_logprobs: Tensor
    """`[N]` as the engine recorded them when it drew (or verified) the tokens."""
    advantages: Tensor
    """`[N]` advantage of the token's sample."""
    weights: Tensor
    """`[N]` 1 or 1 / L (see the module); 0 leaves a token out of loss and statistics."""
    reference_logprobs: Tensor | None = None
    """`[N]` under the initial model, without a gradient; None unless the algorithm needs them."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A number that an algorithm reports of each step."""

    help: str
    """What it says and its unit, in one phrase; docs/monitoring.md has the same."""
    per: Literal["token", "loss"] = "token"
    """What its sum is divided by: the computed response tokens, or the step's loss denominator."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the tokens of one micro-batch, not divided by anything."""

    loss: Tensor
    """Scalar, to be minimised: sum of weight times per-token loss."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Signal name to its scalar sum: all that the algorithm declares, and no others."""


class Algorithm(Protocol):
    """Advantages of a group, and the loss of tokens. Pure: no state, no randomness."""

    @property
    def signals(self) -> Mapping[str, Signal]:
        """What `loss` reports besides the loss, by name (letters, digits and `_`)."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `TokenBatch.reference_logprobs`.

        The learner then keeps the initial model, and computes groups without advantages too.
        """

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` rewards to `[G]` advantages; all exactly 0 when all rewards are equal.

        Raises:
            ValueError: the algorithm cannot learn from groups of this size.
        """

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed policy loss of a micro-batch."""


def centred(rewards: Rewards) -> Rewards:
    """`[G]` rewards minus their mean; exactly 0 when all are equal, without rounding error.

    Raises:
        ValueError: G < 2, where every sample would be its own baseline and nothing is learnt.
    """
    if len(rewards) < 2:
        raise ValueError("the group is the baseline: scheduler.group_size must be at least 2")
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards, np.float64)
    return np.asarray(rewards - rewards.mean(), np.float64)


def importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """`[N]` min(exp(logprobs - behaviour_logprobs), cap), without a gradient.

    Truncated importance sampling (Ionides 2008) bounds the variance that one surprising token can
    cause, at the price of a bias that is 0 where no weight reaches the cap.
    """
    return torch.exp(logprobs.detach() - behaviour_logprobs).clamp(max=cap)
