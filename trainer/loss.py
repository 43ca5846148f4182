"""The loss: the configured algorithm, and its fit to a run.

`Objective` turns rewards into advantages and log-probabilities into a loss. Before advantages
are computed, the overlong shaping of DAPO (arXiv 2503.14476, eq. 13) is added to each reward. With
the longest response L_max (`sampling.max_tokens`), the buffer B (`trainer.overlong_buffer`) and a
response of L tokens, observed ones included, as `sampling.max_tokens` counts them:

    0                            L <= L_max - B
    (L_max - B - L) / B          L_max - B < L <= L_max
    -1                           L = L_max and not finished (in the paper: L > L_max)

A response that reaches L_max has -1 by either line. Metrics and samples keep the task's rewards.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.rollout.contexts import longest_response
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.algorithms.base import (
    STD_EPSILON,
    Algorithm,
    Finish,
    Rewards,
    declares,
    denominator,
    finisher,
)
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.algorithms.reference_kl import WithReferenceKl
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.objective.step_statistics import StepTotals
from asyncrl.trainer.ranks import World
from asyncrl.trainer.step_targets import StepTargets, normalise


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
