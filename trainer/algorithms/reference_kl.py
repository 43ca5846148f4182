"""The KL penalty towards a reference model, with the loss of any algorithm.

For a token with current log-probability log p and log-probability log r under the reference (the
initial model, or what `asyncrl.trainer.scoring` makes of it), the estimators of Schulman's
"Approximating KL divergence":

    k1 = log(p / r)                        of either sign
    k2 = log(p / r)^2 / 2                  never negative
    k3 = r / p - 1 - log(r / p)            never negative, 0 where p = r

They estimate the same number, but their gradients do not (arXiv 2506.09477), so each is used where
its gradient means something (docs/algorithms.md checks this by enumeration):

- `k3` (default; GRPO, arXiv 2402.03300, eq. 4) and `k2` are added to the loss, kl_coefficient
  times, with the token's weight. On-policy k2 has the gradient of KL(current || reference) of each
  token's distribution, k3 that of KL(reference || current).
- `k1` in a loss has a gradient whose mean is 0, so it is part of the reward (RLHF, REINFORCE++): a
  token's advantage becomes A - kl_coefficient * (sum of k1 over it and the tokens after it),
  without gradient. With a critic it is part of the rewards from which advantages are estimated,
  and with several passes it is that of the step's start: the batch is `penalised` already.
  On-policy, with `loss_normalization: sample`, this is the gradient of the KL of whole samples.

`kl_clamp` bounds a token's k2 or k3 from above, and k1 on both sides; beyond it the penalty has no
gradient. The gradient flows through p only. Empty batch: both terms are 0.

**Truncated sampling** (top-p, top-k, min-p) renormalises p and r over two sets of tokens, and their
KL is infinite as soon as the policy's set has a token more. So a token drawn outside the
reference's set is added to that set for this token: r(x) = q(x) / (mass of the set + q(x)) with q
before truncation. Where the reference's set contains the policy's, this is the KL. Otherwise the
sum over the policy's tokens of p log(p / r) is at least log of the set's mass (-0.105 for top_p
0.9), so a k1 that far below 0 carries no information.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch, Wrapper, sums_to_go

_SIGNALS = {
    "policy_loss": Signal("loss without the KL penalty", per="loss", of_loss=True),
    "reference_kl": Signal("KL of the policy from its reference, nats per token"),
}
_ABOVE_CLAMP = 10.0
"""k3 of log(1 + clamp) + 10 exceeds any clamp: e^10 (1 + clamp) far outweighs 1 + log(1 + clamp) +
10, and is finite for the largest clamp."""


@dataclass(frozen=True, slots=True)
class WithReferenceKl(Wrapper):
    """An algorithm with the penalty added; everything but the loss is the algorithm's own."""

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"
    clamp: float | None = None
    """Bound of a token's estimate, in nats."""

    @property
    def signals(self) -> Mapping[str, Signal]:
        """Signals of the algorithm, `policy_loss` and `reference_kl`."""
        return {**self.algorithm.signals, **_SIGNALS}

    @property
    def needs_reference(self) -> bool:
        """Always True: the penalty compares with the reference."""
        return True

    def loss(self, batch: TokenBatch) -> LossSums:
        """Return the loss with the penalty."""
        if batch.reference_logprobs is None:
            raise ValueError("the KL penalty needs reference_logprobs, but the batch has none")
        kl = self.per_token(batch.reference_logprobs - batch.logprobs)
        if self.estimator == "k1" and not batch.penalised:
            to_go = sums_to_go(kl.detach(), batch.samples)
            batch = replace(batch, advantages=batch.advantages - self.coefficient * to_go)
        own = self.algorithm.loss(batch)
        sums = {**own.sums, "policy_loss": own.loss.detach(), "reference_kl": kl.detach().sum()}
        own = replace(own, sums=sums)
        if self.estimator == "k1":
            return own
        penalty = self.coefficient * (batch.weights * kl).sum()
        return own.plus(self.algorithm, "reference_kl", penalty)

    def per_token(self, gap: Tensor) -> Tensor:
        """Map `[N]` log(r / p) to `[N]` estimates."""
        if self.estimator == "k1":
            return -gap if self.clamp is None else (-gap).clamp(-self.clamp, self.clamp)
        if self.estimator == "k3" and self.clamp is not None:
            # Beyond this k3 is above the clamp; without it e^gap is infinite in float32 from 88.7
            # on, and the gradient 0 * inf.
            gap = gap.clamp(max=math.log1p(self.clamp) + _ABOVE_CLAMP)
        estimate = 0.5 * gap.square() if self.estimator == "k2" else gap.exp() - 1 - gap
        return estimate if self.clamp is None else estimate.clamp(max=self.clamp)
