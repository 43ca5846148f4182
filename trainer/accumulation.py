"""The gradient sums of one optimizer step, and what is measured with them.

```
group ─► add ─► micro-batches ─► forward, loss, backward ─► .grad and parts += sums
                                                       └──► totals += sums
finish: factors of the step; gives the denominator
```

Everything is a sum until `finish`, so the order of groups, and how they are split into
micro-batches, changes rounding only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.trajectory import Trajectory
from trainer.algorithms.base import Rewards
from trainer.config import TrainerConfig
from trainer.disagreement import SUMS, disagreement_of
from trainer.errors import NonFiniteError
from trainer.gradient_parts import GradientParts
from trainer.objective import Objective
from trainer.packing import split_by_tokens
from trainer.policy import PackedBatch, Policy
from trainer.ranks import World
from trainer.ranks.totals import of_all_ranks
from trainer.token_batch import token_batch
from trainer.totals import StepTotals


class Accumulation:
    """Of the policy's parameters, whose `.grad` it adds to.

    Args:
        config: the trainer's settings.
        objective: what is optimised.
        policy: the model that is trained.
        reference: the model of the KL penalty; None: there is none.
    """

    def __init__(
        self,
        config: TrainerConfig,
        objective: Objective,
        policy: Policy,
        reference: Policy | None,
    ) -> None:
        self._config = config
        self._objective = objective
        self._policy = policy
        self._reference = reference
        self._parts = GradientParts(list(policy.model.parameters()))
        self.totals = StepTotals(objective.algorithm.signals)
        self.groups: set[int] = set()
        """Those that were added, by number."""

    def add(
        self, group: int, trajectories: Sequence[Trajectory], rewards: Rewards, version: int
    ) -> NDArray[np.float64]:
        """Forward and backward for a whole group, with `[G]` rewards, at a policy version.

        Returns:
            `[G, SUMS]` as `Learner.add_group` does.

        Raises:
            NonFiniteError: the sums hold part of the group and must be dropped.
        """
        advantages = self._objective.advantages(trajectories, rewards)
        silent = not advantages.any()
        disagreement = np.zeros((len(trajectories), SUMS))
        if not (silent and self._objective.skips_zero_variance):
            for indices in split_by_tokens(
                [len(t.prompt_tokens) + len(t.tokens) for t in trajectories],
                self._config.micro_batch_tokens,
            ):
                disagreement[indices] = self._add_micro_batch(
                    [trajectories[i] for i in indices], advantages[indices], group, version
                )
        self.groups.add(group)
        self.totals.add_group(trajectories, rewards, policy_version=version, zero_variance=silent)
        return disagreement

    def finish(self, world: World) -> float:
        """Apply the factors that need the whole step; gives the loss's denominator.

        From then on `totals` are those of all ranks. A collective of them, which may raise
        RankLost.
        """
        self.totals = of_all_ranks(self.totals, world)
        return self._objective.finish(self.totals, self._parts)

    def _add_micro_batch(
        self, trajectories: Sequence[Trajectory], advantages: Rewards, group: int, version: int
    ) -> NDArray[np.float64]:
        """Forward and backward of some samples of a group; gives `[B, SUMS]`."""
        packed = PackedBatch.of(
            [(t.prompt_tokens, t.tokens) for t in trajectories], self._policy.device
        )
        scores = self._policy.score(packed)
        batch = token_batch(
            scores.logprobs, trajectories, advantages, self._config.loss_normalization
        )
        if self._reference is not None:
            with torch.no_grad():
                initial = self._reference.score(packed).logprobs
            batch = dataclasses.replace(batch, reference_logprobs=initial)
        sums = self._objective.algorithm.loss(batch)
        if not bool(torch.isfinite(sums.loss)):
            raise NonFiniteError(f"group {group}: the loss is {float(sums.loss.detach())}")
        self._parts.add(sums.parts)
        sums.loss.backward()
        stale = np.concatenate([t.staleness(version) for t in trajectories])
        fresh = torch.from_numpy(stale == 0).to(self._policy.device)
        self.totals.add_tokens(batch, scores, sums, fresh)
        current = np.array([one.oldest_version == version for one in trajectories])
        return disagreement_of(scores.logprobs, scores.entropy, trajectories, current)
