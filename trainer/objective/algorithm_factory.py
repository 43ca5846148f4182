"""Builds the configured algorithm with its correction, which reports how stale the tokens are.

    effective_share      (sum w)^2 / (N sum w^2) of the weights w with which tokens are trained
    importance_capped    share of tokens whose w was cut to `importance_cap`
    chi_squared          mean of (p / b)^2 - 1, of the ratios before any correction: 0 on-policy
    correction_masked    share of tokens that the correction leaves out

The first two only where the loss uses w: with `proximal_policy: behaviour` it holds the ratio. The
k3 estimate of KL(behaviour || current) is `mismatch.kl`, and over tokens of staleness 0, engine
against trainer, `mismatch.fresh_kl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from asyncrl.trainer import corrections
from asyncrl.trainer.algorithms.base import (
    Algorithm,
    LossSums,
    Signal,
    TokenBatch,
    Wrapper,
    owners_of,
)
from asyncrl.trainer.algorithms.reference_kl import WithReferenceKl
from asyncrl.trainer.algorithms.router_balance import WithRouterBalance
from asyncrl.trainer.base.algorithm_registry import class_of
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.corrections import Correction

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
        found = self.correction(log_ratio, owners_of(batch))
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
    algorithm: Algorithm = Corrected(made, corrections.make(config), clamp, weighs=weighs)
    if config.router_loss_coefficient > 0:
        algorithm = WithRouterBalance(algorithm, config.router_loss_coefficient)
    if config.kl_coefficient > 0:
        return WithReferenceKl(
            algorithm, config.kl_coefficient, config.kl_estimator, config.kl_clamp
        )
    return algorithm
