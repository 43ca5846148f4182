"""The loss: the configured algorithm, its correction, and their fit to a run.

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

**`Objective`** turns rewards into advantages and log-probabilities into a loss. Before advantages
are computed, the overlong shaping of DAPO (arXiv 2503.14476, eq. 13) is added to each reward. With
the longest response L_max (`sampling.max_tokens`), the buffer B (`trainer.overlong_buffer`) and a
response of L tokens, observed ones included, as `sampling.max_tokens` counts them:

    0                            L <= L_max - B
    (L_max - B - L) / B          L_max - B < L <= L_max
    -1                           L = L_max and not finished (in the paper: L > L_max)

A response that reaches L_max has -1 by either line. Metrics and samples keep the task's rewards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.rollout.contexts import longest_response
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import (
    STD_EPSILON,
    Algorithm,
    Finish,
    LossSums,
    Rewards,
    Signal,
    TokenBatch,
    Wrapper,
    declares,
    denominator,
    finisher,
    sample_means,
    sample_sums,
)
from asyncrl.trainer.algorithms.reference_kl import WithReferenceKl
from asyncrl.trainer.algorithms.router_balance import WithRouterBalance
from asyncrl.trainer.base.algorithm_registry import class_of
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.objective.step_statistics import StepTotals
from asyncrl.trainer.ranks import World
from asyncrl.trainer.step_targets import StepTargets, normalise

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


class GradientParts:
    """One gradient per part and parameter, in addition to `.grad`, which holds the loss's own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [one for one in parameters if one.requires_grad]
        self._sums: dict[str, list[Tensor | None]] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add the gradient of each part; the graph is kept for the loss's own backward pass."""
        for name, loss in parts.items():
            new = self._gradients(loss)
            old = self._sums.get(name, [None] * len(new))
            self._sums[name] = [add_up(a, b) for a, b in zip(old, new, strict=True)]

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        found = torch.autograd.grad(loss, self._parameters, retain_graph=True, allow_unused=True)
        return list(found)

    @torch.no_grad()
    def finish(self, factors: Finish) -> None:
        """Scale `.grad`, and add each part times its factor (1 if `factors` lacks it)."""
        if factors.scale != 1:
            for one in self._parameters:
                if one.grad is not None:
                    one.grad.mul_(factors.scale)
        for name, grads in self._sums.items():
            factor = factors.parts.get(name, 1.0)
            for one, grad in zip(self._parameters, grads, strict=True):
                if grad is not None:
                    one.grad = add_up(one.grad, grad.mul_(factor))
        self._sums.clear()


def add_up(mine: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Sum two gradients in the first one's memory; None counts as 0."""
    if mine is None or other is None:
        return other if mine is None else mine
    return mine.add_(other)


def overlong_penalties(lengths: Rewards, *, longest: int, buffer: int) -> Rewards:
    """Map `[G]` lengths in tokens to `[G]` penalties from -1 to 0; all 0 if `buffer` is 0."""
    if buffer == 0:
        return np.zeros(len(lengths))
    return np.clip((longest - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


class Objective:
    """Computes advantages, and turns a step's sums into a gradient.

    Attributes: `algorithm`, and what it `declares`: `needs_critic`, `uses_proximal`. Raises
    TrainerError if groups of this size are too small, or `overlong_buffer` exceeds `max_tokens`.
    """

    def __init__(self, config: TrainerConfig, group_size: int, max_tokens: int | None) -> None:
        self.algorithm: Algorithm = make(config)
        self.needs_critic = declares(self.algorithm, "needs_critic")
        self.uses_proximal = declares(self.algorithm, "uses_proximal")
        self._needs_every_group = declares(self.algorithm, "needs_every_group")
        self._config = config
        self._finisher = finisher(self.algorithm)
        self._longest = max_tokens or 0
        if config.overlong_buffer > self._longest:
            raise TrainerError(
                f"trainer.overlong_buffer ({config.overlong_buffer}) is longer than the longest "
                f"response ({max_tokens})"
            )
        try:
            alike = self.algorithm.advantages(np.ones(group_size))
        except ValueError as error:
            raise TrainerError(f"trainer.algorithm {config.algorithm!r}: {error}") from error
        # Otherwise they are rewards, from which a penalty is subtracted later.
        self._are_advantages = not (self._needs_every_group and alike.any())

    @property
    def skips_zero_variance(self) -> bool:
        """True if groups whose advantages are all 0 are not computed."""
        needed = self._needs_every_group or self.algorithm.needs_reference
        return self._config.skip_zero_variance_groups and not needed

    def is_silent(self, advantages: Rewards) -> bool:
        """Return True if a group's `[G]` advantages, as `advantages` returned them, are all 0."""
        return self._are_advantages and not advantages.any()

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> Rewards:
        """Map `[G]` task rewards to `[G]` advantages."""
        lengths, buffer = map(longest_response, trajectories), self._config.overlong_buffer
        penalties = overlong_penalties(np.array([*lengths]), longest=self._longest, buffer=buffer)
        return self.algorithm.advantages(rewards + penalties)

    @property
    def has_reference_in_reward(self) -> bool:
        """True if the KL penalty is k1's, part of the rewards."""
        return isinstance(self.algorithm, WithReferenceKl) and self.algorithm.estimator == "k1"

    def penalty_in_reward(self, logprobs: Tensor, reference: Tensor | None) -> Tensor | None:
        """`[N]` that the k1 penalty subtracts from each token's reward, if it is used."""
        kl = self.algorithm
        if not isinstance(kl, WithReferenceKl) or kl.estimator != "k1" or reference is None:
            return None
        return kl.coefficient * kl.per_token(reference - logprobs.detach())

    def normalise(self, fixed: Sequence[StepTargets], world: World) -> None:
        """Normalise the advantages of a whole step, if the algorithm does so."""
        if self._config.normalises_over_step:
            normalise(fixed, STD_EPSILON, world)

    def finish(self, totals: StepTotals, parts: GradientParts) -> float:
        """Apply the step's factors to the summed gradients and loss; return the denominator."""
        if self._finisher is not None and totals.groups:
            factors = self._finisher.finish(totals.whole())
            parts.finish(factors)
            totals.finish(factors)
        kind = self._config.loss_normalization
        return denominator(kind, tokens=totals.tokens, samples=totals.samples)
