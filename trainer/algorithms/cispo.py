"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): weights are clipped, no token is dropped.

    A    = (r - mean(r)) / (std(r) + 1e-6)             advantage_normalization: std
    w    = sg(clip(p / b, 1 - low, 1 + high))
    loss = -w * A * log p                              over the step's tokens

PPO drops the gradient of a token whose ratio is clipped; here it keeps its gradient, with the
clipped weight. The paper sets no lower bound: `clip_ratio_low` is 1 by default, so only 1 +
`clip_ratio_high` = 5 bounds the weight (ScaleRL, arXiv 2510.13786: 4 to 8 alike). Empty batch: 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.trainer.algorithms.base import LossSums, Signal, TokenBatch
from asyncrl.trainer.algorithms.grpo import Grpo
from asyncrl.trainer.algorithms.losses import kept, weighted_logprobs


@dataclass(frozen=True, slots=True)
class Cispo(Grpo):
    """Group-relative advantages and the score function with clipped importance weights."""

    signals: ClassVar[Mapping[str, Signal]] = {
        "weight_clipped": Signal(
            "share of tokens whose importance weight was clipped; they keep their gradient"
        )
    }

    def loss(self, batch: TokenBatch) -> LossSums:
        """Summed loss of the module's equations."""
        ratio = torch.exp(batch.logprobs.detach() - batch.behaviour_logprobs)
        inside = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        weight = inside if batch.kept is None else inside * batch.kept
        clipped = ((inside != ratio) & kept(batch)).sum()
        return LossSums(weighted_logprobs(batch, weight), {"weight_clipped": clipped})
