"""The configured algorithm with its correction.

**Corrections** weigh tokens that another policy drew than the one that trains on them. With g = log
of current over behaviour probability of a token, and sums and means over its sample:

    name                  weight of a token                               source
    token_truncated       min(e^g, cap)                                   Ionides 2008; 1802.01561
    token_masked          e^g inside the band, else 0                     IcePop, 2510.18855
    sequence_truncated    min(e^(sum g), cap)                             Ionides 2008
    sequence_masked       e^(sum g) inside the band, else 0
    sequence_rejected     min(e^g, cap) where e^(mean g) is in the band, else 0
    none                  1

A token that is left out stays in the loss's denominator: a step that leaves out much is smaller,
not noisier. On-policy g is rounding, every weight is 1, and nothing is left out. docs/algorithms.md
compares their bias and variance. A corrected loss reports how stale its tokens are:

    effective_share      (sum w)^2 / (N sum w^2) of the weights w with which tokens are trained
    importance_capped    share of tokens whose w was cut to `importance_cap`
    chi_squared          mean of (p / b)^2 - 1, of the ratios before any correction: 0 on-policy
    correction_masked    share of tokens that the correction leaves out

The first two only where the loss uses w: with `proximal_policy: behaviour` it holds the ratio.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import (
    Algorithm,
    LossSums,
    Signal,
    TokenBatch,
    Wrapper,
    sample_means,
    sample_sums,
)
from asyncrl.trainer.algorithms.reference_kl import WithReferenceKl
from asyncrl.trainer.algorithms.router_balance import WithRouterBalance
from asyncrl.trainer.base.algorithm_registry import class_of
from asyncrl.trainer.base.config import TrainerConfig

_OF_WEIGHTS = {
    "importance_capped": Signal("share of tokens whose weight was cut to `trainer.importance_cap`"),
    "effective_share": Signal(
        "effective sample size of the corrected tokens, as a share of them", per="effective"
    ),
}
_SIGNALS = {
    "chi_squared": Signal(
        "chi-squared divergence of the current policy from the behaviour policy, per token"
    ),
    "correction_masked": Signal("share of tokens that `trainer.correction` left out"),
}


class Weights(NamedTuple):
    """Weights of N tokens, without gradients."""

    importance: Tensor
    """`[N]` weight of the token's score function; 0 where it is left out."""
    kept: Tensor
    """`[N]` 1, or 0 where the token is left out."""
    capped: Tensor
    """`[N]` bool: tokens whose weight was cut to `importance_cap`."""


Correction = Callable[[Tensor, Tensor], Weights]
"""Weighs tokens by `[N]` gradient-free log-ratios and the `[N]` indices of their samples. Pure."""


def correction_of(config: TrainerConfig) -> Correction:
    """Return the configured correction."""
    kind, (low, high) = config.correction, config.band_of_correction
    cap = torch.inf if kind.endswith("masked") else config.importance_cap

    def weigh(log_ratio: Tensor, owners: Tensor) -> Weights:
        if kind == "none":
            ones = torch.ones_like(log_ratio)
            return Weights(ones, ones, torch.zeros_like(ones, dtype=torch.bool))
        by_sample = kind in ("sequence_truncated", "sequence_masked")
        ratio = torch.exp(sample_sums(log_ratio, owners) if by_sample else log_ratio)
        weights, capped = ratio.clamp(max=cap), ratio > cap
        if kind.endswith("truncated"):
            return Weights(weights, torch.ones_like(ratio), capped)
        if kind == "sequence_rejected":
            ratio = torch.exp(sample_means(log_ratio, owners))
        keep = (ratio >= low) & (ratio <= high)
        weights = torch.where(keep, weights, 0.0)
        return Weights(weights, keep.to(weights.dtype), capped & keep)

    return weigh


@dataclass(frozen=True, slots=True)
class Corrected(Wrapper):
    """An algorithm whose tokens are weighted by a correction."""

    correction: Correction
    log_ratio_clamp: float | None = None
    """Bound of |log(p / b)|, and of |log(p / x)|, in nats, if any."""
    weighs: bool = True
    """True if the loss uses the weights, not only what is left out."""

    @property
    def signals(self) -> Mapping[str, Signal]:
        """Signals of the algorithm, and those of the module."""
        of_weights = _OF_WEIGHTS if self.weighs else {}
        return {**self.algorithm.signals, **of_weights, **_SIGNALS}

    def loss(self, batch: TokenBatch) -> LossSums:
        """Return the algorithm's loss of the corrected batch."""
        proximal = batch.proximal_logprobs
        current = batch.logprobs.detach() if proximal is None else proximal
        log_ratio = current - batch.behaviour_logprobs
        if self.log_ratio_clamp is not None:
            log_ratio = log_ratio.clamp(-self.log_ratio_clamp, self.log_ratio_clamp)
            batch = replace(batch, behaviour_logprobs=current - log_ratio)
            if proximal is not None:
                now = batch.logprobs.detach()
                moved = (now - proximal).clamp(-self.log_ratio_clamp, self.log_ratio_clamp)
                batch = replace(batch, proximal_logprobs=now - moved)
        found = self.correction(log_ratio, batch.samples)
        own = self.algorithm.loss(replace(batch, importance=found.importance, kept=found.kept))
        squares = (2 * log_ratio.double()).exp()
        sums = {"chi_squared": (squares - 1).sum(), "correction_masked": (1 - found.kept).sum()}
        if self.weighs:
            used = found.importance.double()
            sums["effective_share"] = torch.stack([used.sum(), used.square().sum()])
            sums["importance_capped"] = (found.capped & (batch.weights != 0)).sum()
        return LossSums(own.loss, {**own.sums, **sums}, own.parts)


def make(config: TrainerConfig) -> Algorithm:
    """Build the configured algorithm, with its correction and the KL penalty if there is one."""
    made: Algorithm = class_of(config.algorithm).from_config(config)
    weighs, clamp = config.proximal_policy == "current", config.log_ratio_clamp
    whole: Algorithm = Corrected(made, correction_of(config), clamp, weighs=weighs)
    if config.router_loss_coefficient > 0:
        whole = WithRouterBalance(whole, config.router_loss_coefficient)
    if config.kl_coefficient > 0:
        return WithReferenceKl(whole, config.kl_coefficient, config.kl_estimator, config.kl_clamp)
    return whole
