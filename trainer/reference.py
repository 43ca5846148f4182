"""The reference of the KL penalty: the initial model, or one that follows the policy.

    reference_refresh_steps: N    a copy of the policy after every N steps
    reference_decay: d            after each step, d times itself plus 1 - d times the policy

A reference that follows the policy is part of each checkpoint, so a resumed run has the same one.
"""

from __future__ import annotations

import torch

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.model.packed_batch import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.sharding.rows import local


class Reference:
    """Attribute: `policy`, the reference's model; its weights have no gradients.

    Args:
        config: the trainer's settings.
        policy: the initial model, a copy of its own.
    """

    def __init__(self, config: TrainerConfig, policy: Policy) -> None:
        self.policy = policy
        self._every = config.reference_refresh_steps
        self._decay = config.reference_decay
        policy.model.requires_grad_(requires_grad=False)

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """`[N]` of the response tokens; the caller wants no gradients."""
        return self.policy.score(batch).logprobs

    @property
    def moves(self) -> bool:
        """Whether it is ever another one than the initial model."""
        return self._every is not None or self._decay is not None

    @torch.no_grad()
    def follow(self, trained: Policy, version: int) -> None:
        """Take note of the policy at this version, right after a step."""
        if self._every is not None and version % self._every == 0:
            for mine, theirs in self._pairs(trained):
                mine.copy_(theirs)
        if self._decay is not None:
            for mine, theirs in self._pairs(trained):
                mine.lerp_(theirs, 1 - self._decay)

    def _pairs(self, trained: Policy) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters of both, or this rank's parts; buffers of these models are constants."""
        mine, theirs = (
            [local(one) for one in p.model.parameters()] for p in (self.policy, trained)
        )
        return list(zip(mine, theirs, strict=True))
