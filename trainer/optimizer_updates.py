"""The optimizer steps of a step: one, or `trainer.ppo_epochs` times `trainer.minibatches`.

```
groups ─► look or add, and keep ─┐  (as they arrive)
         plan fulfilled ─────────┴─► normalise advantages over the step
                                     for each epoch, for each minibatch of groups, in data order:
                                         replay its groups ─► divide, clip, AdamW
```

With one minibatch, and advantages that need no mean over the step, the gradients of the first
epoch are accumulated as groups arrive. Otherwise groups are only scored then, and kept. Advantages,
returns and the proximal and reference log-probabilities stay those of the step's start.

After that come the critic's own passes over the kept groups, in which the policy stays as it is.

The samples were drawn by the policy of the step's start or an older one. So only the first
optimizer step sees the policy that they are exactly on-policy for, if they are so at all.

With several ranks each keeps its own groups. A minibatch is a share of the groups of all ranks, so
a rank may have none of it; it takes part in the optimizer step all the same.

The critic's own passes over the groups of a step (`critic.passes`); the policy stays as it is.

Returns and old values are those of the step's start, as in the first pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncrl.trainer.accumulation import Accumulation, Kept, of_all_ranks
from asyncrl.trainer.algorithms.reinforce_plus_plus import mean_of
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.critic import Critic
from asyncrl.trainer.loss import Objective
from asyncrl.trainer.model.micro_batches import Work
from asyncrl.trainer.model.token_batch import denominator, to_device, weights_of
from asyncrl.trainer.objective.step_statistics import StepTotals
from asyncrl.trainer.objective.value_loss import value_loss
from asyncrl.trainer.optimizer.update import Update
from asyncrl.trainer.ranks import World
from asyncrl.trainer.scoring import Models
from asyncrl.trainer.sharding.lockstep import Lockstep
from asyncrl.trainer.step_targets import Fixed
from asyncrl.wire.records.step import LearnerMetrics


def take_pass(
    critic: Critic,
    shares: Sequence[Sequence[int]],
    kept: Mapping[int, Kept],
    config: TrainerConfig,
    world: World,
    version: int,
) -> None:
    """One optimizer step of the critic for each share of the step's groups.

    Args:
        critic: with a trunk of its own.
        shares: groups of all ranks, by number.
        kept: those of this rank.
        config: the trainer's settings.
        world: the ranks; each share is a collective of them.
        version: of the policy.

    Raises:
        NonFiniteError: a gradient is not finite.
        RankLost: another rank did not take part.
    """
    for share in shares:
        critic.zero_grad()
        size = _add_gradients(critic, [kept[one] for one in share if one in kept], config)
        ranks = world.gather(msgspec.msgpack.encode(size), "the size of the critic's minibatch")
        sizes = [msgspec.msgpack.decode(one, type=tuple[int, int]) for one in ranks]
        tokens, samples = (sum(column) for column in zip(*sizes, strict=True))
        critic.step(version, denominator(config.loss_normalization, tokens=tokens, samples=samples))


def _add_gradients(
    critic: Critic, groups: Sequence[Kept], config: TrainerConfig
) -> tuple[int, int]:
    """Forward and backward; gives the tokens and samples of these groups."""
    work = Work([], [], [])
    for index, one in enumerate(groups):
        work.add(one.new.trajectories, np.zeros(len(one.new.trajectories)), index)
    for part in work.split(config.micro_batch_tokens):
        fixed = Fixed.of([groups[index].fixed[place] for index, place in part.owners])
        assert fixed.values is not None and fixed.returns is not None  # noqa: S101, PT018
        weights = weights_of(
            part.trajectories,
            config.loss_normalization,
            masks_truncated=config.mask_truncated_completions,
        )
        found = value_loss(
            critic.values(part.trajectories).tokens,
            fixed.values,
            fixed.returns,
            to_device(weights, fixed.values.device, fixed.values.dtype),
            critic.config.value_clip,
        )
        (critic.config.value_coefficient * found.loss).backward()
    return sum(one.trained_count for one in work.trajectories), len(work.trajectories)


@dataclass(frozen=True, slots=True)
class Updated:
    """What is known of one optimizer step."""

    totals: StepTotals
    denominator: float
    norm: float
    """Of the policy's gradient before clipping."""


class Stepping:
    """Changes the weights of the policy and the critic.

    Args:
        config: the trainer's settings.
        objective: what is optimised.
        models: the policy, and those it is trained with.
        update: of the policy.
        world: the ranks.
        lockstep: as in `Accumulation`.
    """

    def __init__(
        self,
        config: TrainerConfig,
        objective: Objective,
        models: Models,
        update: Update,
        world: World,
        lockstep: Lockstep,
    ) -> None:
        self._config = config
        self._objective = objective
        self._models = models
        self._update = update
        self._world = world
        self._lockstep = lockstep
        self._has_passes = config.updates_per_step > 1 or config.gathers_first
        self._keeps = self._has_passes or config.critic.passes > 1
        self.torn = False
        """Whether a step changed weights and then failed."""
        self.centre = 0.0
        """Mean of the last step's advantages, of algorithms that normalise them over the step."""

    def check(self) -> None:
        """Refuse to continue after a step that changed weights and then failed.

        Raises:
            TrainerError: such a step was taken.
        """
        if self.torn:
            raise TrainerError(
                "a step failed after some of its weights had changed: restore a checkpoint"
            )

    def empty(self) -> Accumulation:
        """Nothing yet; drops all gradients."""
        self._update.zero_grad()
        if self._models.critic is not None:
            self._models.critic.zero_grad()
        return Accumulation(
            self._config,
            self._objective,
            self._models,
            self._lockstep,
            keeps=self._keeps,
            centre=self.centre,
        )

    def take(self, first: Accumulation, version: int, rate: float) -> LearnerMetrics:
        """All optimizer steps of a step, in which `first` has seen every group.

        A collective of all ranks.

        Raises:
            NonFiniteError: a loss or gradient is not finite. The weights are unchanged, unless
                `torn`.
            RankLost: another rank did not take part.
        """
        groups = self._of_all_ranks(list(first.groups)) if self._keeps else []
        if not groups or not self._has_passes:
            done = self._apply(first, version, rate)
            metrics = done.totals.metrics(done.denominator, grad_norm=done.norm, learning_rate=rate)
            mean = mean_of(done.totals.signal_sums, done.totals.computed)
            self.centre = self.centre if mean is None else mean
        else:
            updates = self._passes(first, groups, version, rate)
            if self._config.gathers_first:
                first.totals = of_all_ranks(first.totals, self._world)
            metrics = metrics_of(first.totals, updates, rate)
        if groups:
            self._fit_critic(first, groups, version)
        self.torn = False
        return metrics

    def _fit_critic(self, first: Accumulation, groups: Sequence[int], version: int) -> None:
        """The critic's passes after the first; the policy stays as it is."""
        critic = self._models.critic
        if critic is None:
            return
        shares = minibatches_of(groups, self._config.critic.minibatches)
        for _pass in range(1, self._config.critic.passes):
            take_pass(critic, shares, first.groups, self._config, self._world, version)

    def _passes(
        self, first: Accumulation, groups: Sequence[int], version: int, rate: float
    ) -> list[Updated]:
        kept = first.groups
        fixed = [one for group in sorted(kept) for _, one in sorted(kept[group].fixed.items())]
        self._objective.normalise(fixed, self._world)
        done: list[Updated] = []
        if not self._config.gathers_first:
            done.append(self._apply(first, version, rate))
        for _epoch in range(len(done), self._config.ppo_epochs):
            for share in minibatches_of(groups, self._config.minibatches):
                sums = self.empty()
                sums.replay([kept[group] for group in share if group in kept], version)
                done.append(self._apply(sums, version, rate))
        return done

    def _apply(self, sums: Accumulation, version: int, rate: float) -> Updated:
        """Divide, clip, AdamW, for the policy and the critic."""
        denominator, norm = sums.finish(self._world), 0.0
        critic, limit = self._models.critic, self._config.max_grad_norm
        if sums.totals.groups:
            if version >= self._config.critic.head_start_steps:
                norm = self._update.step(rate, denominator, limit)
                self.torn = True  # until the whole step is done
            if critic is not None:
                critic.step(version, denominator)
                self.torn = True
        return Updated(sums.totals, denominator, norm)

    def _of_all_ranks(self, groups: list[int]) -> list[int]:
        found = self._world.gather(msgspec.msgpack.encode(groups), "the step's groups")
        return sorted(one for rank in found for one in msgspec.msgpack.decode(rank, type=list[int]))


def minibatches_of(groups: Sequence[int], count: int) -> list[list[int]]:
    """Groups in ascending order, in `count` shares whose sizes differ by at most one.

    Sizes differ only where groups of the step failed. Fewer groups than shares give fewer shares.

    >>> minibatches_of([7, 4, 5, 6], 2)
    [[4, 5], [6, 7]]
    >>> minibatches_of([4, 6, 7], 2), minibatches_of([4], 2)
    ([[4, 6], [7]], [[4]])
    """
    ordered = sorted(groups)
    size, longer = divmod(len(ordered), count)
    out, start = [], 0
    for share in range(count):
        end = start + size + (share < longer)
        out.append(ordered[start:end])
        start = end
    return [share for share in out if share]


def metrics_of(
    first: StepTotals, updates: Sequence[Updated], learning_rate: float
) -> LearnerMetrics:
    """The record of a step with several updates.

    What is said of samples and of mismatch is that of their arrival. Loss, gradient norm and the
    algorithm's signals are means over the updates, weighed by their size.
    """
    together = StepTotals(first.signals)
    for one in updates:
        together.absorb_loss(one.totals)
    denominator = sum(one.denominator for one in updates)
    norm = sum(one.norm for one in updates) / len(updates)
    found = first.metrics(1.0, grad_norm=norm, learning_rate=learning_rate)
    learning = msgspec.structs.replace(
        found.learning, loss=together.sums.loss / denominator, optimizer_steps=len(updates)
    )
    signals = together.measured_signals(denominator)
    return msgspec.structs.replace(found, learning=learning, algorithm=signals)
