"""PPO's clipped loss with its settings, as `grpo` and `ppo` have it; they differ in advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch
from asyncrl.trainer.algorithms.losses import Clip, decoupled
from asyncrl.trainer.base.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Clipped:
    """Decoupled, or against the policy that drew the tokens (`proximal_policy: behaviour`)."""

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
    """Infinite: none."""

    @staticmethod
    def settings_of(config: TrainerConfig) -> dict[str, Any]:
        """The fields above, from the trainer's settings."""
        return {
            "proximal_policy": config.proximal_policy,
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "dual_clip": math.inf if config.dual_clip is None else config.dual_clip,
        }

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss reads `TokenBatch.proximal_logprobs`."""
        return self.proximal_policy == "current"

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the equations in `asyncrl.trainer.algorithms.grpo`."""
        clip = Clip(self.clip_ratio_low, self.clip_ratio_high, self.dual_clip)
        if self.proximal_policy == "behaviour":
            return clip.loss(batch, torch.exp(batch.logprobs - batch.behaviour_logprobs))
        return decoupled(batch, clip)
