"""Losses that several algorithms share: score function, clipped ratio, weighted log-probability.

Shapes as in `asyncrl.trainer.algorithms.base`. With current probability p, behaviour probability b,
advantage A, the token's weight v, and the correction's importance w and kept m:

    score function   -v w A u,  u = p / sg(p)          its gradient is -v w A grad log p
    clipped          -v m min(r A, clip(r) A),  r = p / b, or any ratio given instead
    decoupled        -v w min(u A, clip(u) A),  u = p / x with the proximal policy x; without one,
                     x = p and it is the score function
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch
from asyncrl.trainer.base.config import TrainerConfig


def importance(batch: TokenBatch) -> Tensor:
    """`[N]` the correction's weights; 1 without a correction."""
    if batch.importance is None:
        return torch.ones_like(batch.logprobs.detach())
    return batch.importance


def kept(batch: TokenBatch) -> Tensor:
    """`[N]` bool: tokens that neither their weight nor the correction leaves out."""
    used = batch.weights != 0
    return used if batch.kept is None else used & (batch.kept != 0)


def score_function(batch: TokenBatch, advantages: Tensor) -> Tensor:
    """Scalar score function with `[N]` advantages."""
    # u is 1, written as a ratio so that its gradient is the equation's too.
    ratio = torch.exp(batch.logprobs - batch.logprobs.detach())
    return -(batch.weights * importance(batch) * advantages * ratio).sum()


def weighted_logprobs(batch: TokenBatch, weight: Tensor) -> Tensor:
    """Scalar -v weight A log p, with `[N]` weights that have no gradient."""
    return -(batch.weights * weight * batch.advantages * batch.logprobs).sum()


@dataclass(frozen=True, slots=True)
class Clip:
    """PPO's clip (arXiv 1707.06347, eq. 7), with dual clip (1912.09729, eq. 5)."""

    low: float
    high: float
    dual: float = torch.inf
    """The ratio at which the loss is bounded if A < 0."""

    def loss(self, batch: TokenBatch, ratio: Tensor) -> LossSums:
        """Loss with `[N]` ratios that carry the gradient; signals `clip_ratio`, `dual_clipped`."""
        inside = ratio.clamp(1 - self.low, 1 + self.high)
        advantages = batch.advantages
        surrogate = torch.minimum(ratio * advantages, inside * advantages)
        floor = torch.where(advantages < 0, self.dual * advantages, -torch.inf)
        used = kept(batch)
        over = (surrogate.detach() < floor) & used
        high = (advantages > 0) & (ratio > 1 + self.high)
        low = (advantages < 0) & (ratio < 1 - self.low)
        per_token = batch.weights * torch.maximum(surrogate, floor)
        if batch.kept is not None:
            per_token = per_token * batch.kept
        clipped = ((high | low | over) & used).sum()
        return LossSums(-per_token.sum(), {"clip_ratio": clipped, "dual_clipped": over.sum()})


def decoupled(batch: TokenBatch, clip: Clip) -> LossSums:
    """Decoupled loss; signals `clip_ratio` and `dual_clipped`."""
    weight = importance(batch)
    if batch.proximal_logprobs is None:
        zero = torch.zeros_like(weight).sum()
        loss = score_function(batch, batch.advantages)
        return LossSums(loss, {"clip_ratio": zero, "dual_clipped": zero})
    ratio = torch.exp(batch.logprobs - batch.proximal_logprobs)
    return clip.loss(replace(batch, weights=batch.weights * weight), ratio)


@dataclass(frozen=True, slots=True)
class Clipped:
    """PPO's clipped loss, for GRPO and PPO: decoupled, or with `proximal_policy: behaviour`."""

    signals: ClassVar[Mapping[str, Signal]] = {
        "clip_ratio": Signal(
            "share of tokens that have no gradient because their ratio was clipped"
        ),
        "dual_clipped": Signal("share of tokens whose ratio was clipped by `trainer.dual_clip`"),
    }
    needs_reference: ClassVar[bool] = False

    proximal_policy: Literal["current", "behaviour"]
    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip: float

    @staticmethod
    def settings_of(config: TrainerConfig) -> dict[str, Any]:
        """Return the fields above, from the trainer's settings."""
        return {
            "proximal_policy": config.proximal_policy,
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "dual_clip": math.inf if config.dual_clip is None else config.dual_clip,
        }

    @property
    def uses_proximal(self) -> bool:
        """True if the loss reads `TokenBatch.proximal_logprobs`."""
        return self.proximal_policy == "current"

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the equations in `asyncrl.trainer.algorithms.grpo`."""
        clip = Clip(self.clip_ratio_low, self.clip_ratio_high, self.dual_clip)
        if self.proximal_policy == "behaviour":
            return clip.loss(batch, torch.exp(batch.logprobs - batch.behaviour_logprobs))
        return decoupled(batch, clip)
