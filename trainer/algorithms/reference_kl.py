"""The KL penalty towards the initial model, added to the loss of any algorithm.

GRPO (arXiv 2402.03300, eq. 4) estimates KL(current || reference) per token with the k3 estimator of
Schulman's "Approximating KL divergence". For a token with current log-probability log p and
log-probability log r under the reference, the initial model:

    k3   = r / p - 1 - log(r / p)                      never negative, 0 where p = r
    loss = algorithm's loss + kl_coefficient * sum of weight * k3

The gradient flows through p only. Empty batch: both terms are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.algorithms.base import Algorithm, LossSums, Rewards, Signal, TokenBatch

_SIGNALS = {
    "policy_loss": Signal("loss without the KL penalty", per="loss"),
    "reference_kl": Signal("KL of the policy from the initial model, nats per token"),
}


@dataclass(frozen=True, slots=True)
class WithReferenceKl:
    """An algorithm and the penalty. Everything but the loss is the algorithm's own."""

    algorithm: Algorithm
    coefficient: float
    """Weight of the penalty, `trainer.kl_coefficient`."""

    @property
    def signals(self) -> Mapping[str, Signal]:
        """Those of the algorithm, `policy_loss` and `reference_kl`."""
        return {**self.algorithm.signals, **_SIGNALS}

    @property
    def needs_reference(self) -> bool:
        """True: the penalty compares with the initial model."""
        return True

    def advantages(self, rewards: Rewards) -> Rewards:
        """`[G]` advantages of the algorithm."""
        return self.algorithm.advantages(rewards)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equation.

        Raises:
            ValueError: the batch has no `reference_logprobs`.
        """
        if batch.reference_logprobs is None:
            raise ValueError("the KL penalty needs reference_logprobs, and the batch has none")
        own = self.algorithm.loss(batch)
        gap = batch.reference_logprobs - batch.logprobs
        k3 = gap.exp() - 1 - gap
        penalty = self.coefficient * (batch.weights * k3).sum()
        return LossSums(
            own.loss + penalty,
            {**own.sums, "policy_loss": own.loss.detach(), "reference_kl": k3.detach().sum()},
        )
