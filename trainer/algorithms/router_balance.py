"""A loss that keeps the experts of a mixture in use, with the loss of any algorithm.

For a sample of L response tokens, of which layer m sends each to K of E experts with router
probabilities p_t (softmax over all E):

    f_e = share of the sample's K * L choices that fell on e          without gradient
    balance = mean over m of  E * sum over e of f_e * (mean over t of p_te)

It is 1 where experts are used alike, at most E / K. router_loss_coefficient times it is added to
the loss, with the tokens' weights. Shares are per sample, not per batch (DeepSeek-V2, arXiv
2405.04434, eq. 23-25; unlike the Switch loss, arXiv 2101.03961, eq. 4): the loss adds up.

Groups that are not computed (`skip_zero_variance_groups`) have no such loss. Empty batch: 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch, Wrapper

_SIGNALS = {"router_balance": Signal("imbalance of experts: 1 if all are used alike", per="loss")}


@dataclass(frozen=True, slots=True)
class WithRouterBalance(Wrapper):
    """An algorithm with the router loss added."""

    coefficient: float

    @property
    def signals(self) -> Mapping[str, Signal]:
        """Signals of the algorithm, and `router_balance`."""
        return {**self.algorithm.signals, **_SIGNALS}

    def loss(self, batch: TokenBatch) -> LossSums:
        """Return the loss with the balance added."""
        if batch.routes is None:
            raise ValueError("the router loss needs routes, but the batch has none")
        own, routes = self.algorithm.loss(batch), batch.routes
        balance = _balance(routes.logits, routes.experts_per_token, batch.samples, batch.weights)
        own = replace(own, sums={**own.sums, "router_balance": balance.detach()})
        return own.plus(self.algorithm, "router", self.coefficient * balance)


def _balance(logits: Sequence[Tensor], chosen: int, owners: Tensor, weights: Tensor) -> Tensor:
    """Sum over N tokens of weight times imbalance; `logits` are `[N, E]` of each layer."""
    samples = int(owners[-1]) + 1 if len(owners) else 0
    counts = torch.bincount(owners, minlength=samples).to(weights.dtype)
    total = weights.new_zeros(())
    for layer in logits:
        probabilities = torch.softmax(layer.to(weights.dtype), -1)
        picked = torch.zeros_like(probabilities)
        picked.scatter_(-1, layer.detach().topk(chosen, -1).indices, 1.0)
        shares = picked.new_zeros(samples, picked.shape[1]).index_add_(0, owners, picked)
        shares = shares / (chosen * counts[:, None])
        per_token = picked.shape[1] * (shares[owners] * probabilities).sum(-1)
        total = total + (weights * per_token).sum()
    return total / max(len(logits), 1)
