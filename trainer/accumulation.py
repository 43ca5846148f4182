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
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.trajectory import Trajectory
from trainer.algorithms.base import Rewards
from trainer.config import TrainerConfig
from trainer.disagreement import SUMS, disagreement_of
from trainer.errors import NonFiniteError
from trainer.gradient_parts import GradientParts
from trainer.micro_batches import Work
from trainer.objective import Objective
from trainer.policy import PackedBatch, Policy
from trainer.ranks import World
from trainer.ranks.totals import of_all_ranks
from trainer.token_batch import token_batch
from trainer.totals import StepTotals
from trainer.transfer import to_device


class NewGroup(NamedTuple):
    """A whole group that fits."""

    group: int
    trajectories: Sequence[Trajectory]
    rewards: Rewards
    """`[G]`."""


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
        self._losses: list[tuple[tuple[int, ...], Tensor]] = []
        """Groups and loss of each micro-batch, not read."""

    def add(self, groups: Sequence[NewGroup], version: int) -> list[Tensor]:
        """Forward and backward for whole groups at a policy version; they share micro-batches.

        Returns:
            `[G, SUMS]` of each group as `Learner.add_groups` does.
        """
        work = Work([], [], [])
        for index, one in enumerate(groups):
            advantages = self._objective.advantages(one.trajectories, one.rewards)
            silent = not advantages.any()
            if not (silent and self._objective.skips_zero_variance):
                work.add(one.trajectories, advantages, index)
            self.groups.add(one.group)
            self.totals.add_group(
                one.trajectories, one.rewards, policy_version=version, zero_variance=silent
            )
        size, device = len(groups[0].trajectories), self._policy.device
        rows = torch.zeros((len(groups) * size, SUMS), dtype=torch.float64, device=device)
        for part in work.split(self._config.micro_batch_tokens):
            rows[to_device(part.places(size), device)] = self._add_micro_batch(part, version)
        return list(rows.split(size))

    def finish(self, world: World) -> float:
        """Apply the factors that need the whole step; gives the loss's denominator.

        From then on `totals` are those of all ranks. A collective of them.

        Raises:
            NonFiniteError: a loss is not finite, on every rank alike; names the groups.
            RankLost: another rank did not take part.
        """
        self.totals = of_all_ranks(self.totals, world)
        self._refuse_losses_that_are_no_numbers()
        return self._objective.finish(self.totals, self._parts)

    def _add_micro_batch(self, work: Work, version: int) -> Tensor:
        """Forward and backward of some samples; gives `[B, SUMS]`, not read."""
        trajectories = work.trajectories
        packed = PackedBatch.of(
            [(t.prompt_tokens, t.tokens) for t in trajectories], self._policy.device
        )
        scores = self._policy.score(packed)
        batch = token_batch(
            scores.logprobs,
            trajectories,
            np.array(work.advantages),
            self._config.loss_normalization,
        )
        if self._reference is not None:
            with torch.no_grad():
                initial = self._reference.score(packed).logprobs
            batch = dataclasses.replace(batch, reference_logprobs=initial)
        sums = self._objective.algorithm.loss(batch)
        self._losses.append((tuple(sorted({t.id.group for t in trajectories})), sums.loss.detach()))
        self._parts.add(sums.parts)
        sums.loss.backward()
        stale = np.concatenate([t.staleness(version) for t in trajectories])
        self.totals.add_tokens(batch, scores, sums, to_device(stale == 0, self._policy.device))
        current = np.array([one.oldest_version == version for one in trajectories])
        return disagreement_of(scores.logprobs, scores.entropy, trajectories, current)

    def _refuse_losses_that_are_no_numbers(self) -> None:
        """Once a step: reading a loss makes the host wait for all that the device was given."""
        self.totals.read()
        if math.isfinite(self.totals.sums.loss):
            return
        for groups, loss in self._losses:
            if not math.isfinite(value := float(loss)):
                named = f"group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))}"
                raise NonFiniteError(f"the loss of {named} is {value}")
        raise NonFiniteError(f"the loss is {self.totals.sums.loss}, by groups of another rank")
