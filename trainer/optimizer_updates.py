"""The optimizer steps of a step: one, or `trainer.ppo_epochs` times `trainer.minibatches`.

```
groups ─► add, and keep ─────────┐  (as they arrive)
         plan fulfilled ─────────┴─► normalise advantages over the step
                                     for each epoch, for each minibatch of groups, in data order:
                                         replay its groups ─► divide, clip, AdamW
```

With one minibatch, and advantages that need no mean over the step, the gradients of the first epoch
are accumulated as groups arrive. Otherwise groups are only scored then, and kept. All targets stay
those of the step's start. Afterwards the critic takes its own passes over the kept groups
(`critic.passes`), in which the policy does not change.

The samples were drawn by the policy of the step's start or an older one, so at most the first
optimizer step is on-policy. All ranks take part in a minibatch, with none of its groups, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from asyncrl.trainer.accumulation import Accumulation, Kept, Work, of_all_ranks
from asyncrl.trainer.algorithms.base import denominator, to_device, weights_of
from asyncrl.trainer.algorithms.reinforce_plus_plus import mean_of
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.critic import Critic, value_loss
from asyncrl.trainer.loss import Objective
from asyncrl.trainer.objective.step_statistics import StepTotals
from asyncrl.trainer.optimizer.optimizer import Update
from asyncrl.trainer.ranks import World
from asyncrl.trainer.scoring import Models
from asyncrl.trainer.sharding.lockstep import Lockstep
from asyncrl.trainer.step_targets import StepTargets
from asyncrl.wire.records.step import LearnerMetrics


def take_pass(
    critic: Critic,
    shares: Sequence[Sequence[int]],
    kept: Mapping[int, Kept],
    config: TrainerConfig,
    world: World,
    version: int,
) -> None:
    """Take one optimizer step of the critic for each share of the step's groups. Collective.

    The critic has its own trunk; `shares` are group indices of all ranks, `kept` this rank's.
    """
    for share in shares:
        critic.update.zero_grad()
        size = _add_gradients(critic, [kept[one] for one in share if one in kept], config)
        ranks = world.gather(msgspec.msgpack.encode(size), "the size of the critic's minibatch")
        sizes = [msgspec.msgpack.decode(one, type=tuple[int, int]) for one in ranks]
        tokens, samples = (sum(column) for column in zip(*sizes, strict=True))
        critic.step(version, denominator(config.loss_normalization, tokens=tokens, samples=samples))


def _add_gradients(critic: Critic, kept: Sequence[Kept], config: TrainerConfig) -> tuple[int, int]:
    """Run forward and backward; return the tokens and samples of these groups."""
    work = Work([], [], [])
    for index, one in enumerate(kept):
        work.add(one.new.trajectories, np.zeros(len(one.new.trajectories)), index)
    for part in work.split(config.micro_batch_tokens):
        fixed = StepTargets.of([kept[index].fixed[place] for index, place in part.owners])
        assert fixed.values is not None and fixed.returns is not None  # noqa: S101, PT018
        some, masks = part.trajectories, config.mask_truncated_completions
        each = weights_of(some, config.loss_normalization, masks_truncated=masks)
        weights = to_device(each, fixed.values.device, fixed.values.dtype)
        values, clip = critic.values(some).tokens, critic.config.value_clip
        found = value_loss(values, fixed.values, fixed.returns, weights, clip)
        (critic.config.value_coefficient * found.loss).backward()
    return sum(one.trained_count for one in work.trajectories), len(work.trajectories)


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of one optimizer step."""

    totals: StepTotals
    denominator: float
    norm: float
    """Norm of the policy's gradient before clipping."""


class Stepping:
    """Changes the weights of the policy and the critic."""

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
        """True if a step changed weights and then failed."""
        self.centre = 0.0
        """Mean advantage of the last step, for algorithms that normalise over the step."""

    def check(self) -> None:
        """Raise TrainerError after a step that changed weights and then failed."""
        if self.torn:
            raise TrainerError("a step failed when some weights had changed: restore a checkpoint")

    def empty(self) -> Accumulation:
        """Zero the gradients and return an empty accumulation."""
        self._update.zero_grad()
        if self._models.critic is not None:
            self._models.critic.update.zero_grad()
        parts = (self._config, self._objective, self._models, self._lockstep)
        return Accumulation(*parts, keeps=self._keeps, centre=self.centre)

    def take(self, first: Accumulation, version: int, rate: float) -> LearnerMetrics:
        """Take all optimizer steps of a step, of which `first` has seen every group. Collective.

        Raises NonFiniteError if a loss or gradient is not finite: nothing changed unless `torn`.
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
        critic = self._models.critic
        if groups and critic is not None:
            shares = minibatches_of(groups, self._config.critic.minibatches)
            for _pass in range(1, self._config.critic.passes):
                take_pass(critic, shares, first.groups, self._config, self._world, version)
        self.torn = False
        return metrics

    def _passes(
        self, first: Accumulation, groups: Sequence[int], version: int, rate: float
    ) -> list[Updated]:
        kept = first.groups
        fixed = [one for group in sorted(kept) for _, one in sorted(kept[group].fixed.items())]
        self._objective.normalise(fixed, self._world)
        done: list[Updated] = []
        if not self._config.gathers_first:
            done.append(self._apply(first, version, rate))
        # `add` has not scored the reference then, unless rewards need it.
        refers = self._config.gathers_first and not self._objective.has_reference_in_reward
        for epoch in range(len(done), self._config.ppo_epochs):
            for share in minibatches_of(groups, self._config.minibatches):
                sums = self.empty()
                own = [kept[group] for group in share if group in kept]
                sums.replay(own, version, refers=refers and epoch == 0)
                done.append(self._apply(sums, version, rate))
        return done

    def _apply(self, sums: Accumulation, version: int, rate: float) -> Updated:
        """Divide, clip and apply AdamW, for the policy and the critic."""
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
    """Split groups in ascending order into `count` shares whose sizes differ by at most one.

    Sizes differ only if groups of the step failed. Fewer groups than shares give fewer shares.

    >>> minibatches_of([7, 4, 5, 6], 2)
    [[4, 5], [6, 7]]
    >>> minibatches_of([4, 6, 7], 2), minibatches_of([4], 2)
    ([[4, 6], [7]], [[4]])
    """
    shares = np.array_split(sorted(groups), count)
    return [share.tolist() for share in shares if len(share)]


def metrics_of(first: StepTotals, updates: Sequence[Updated], rate: float) -> LearnerMetrics:
    """The record of a step with several updates.

    Samples and mismatch are as on arrival; loss, norm and signals are means over the updates.
    """
    together = StepTotals(first.signals)
    for one in updates:
        together.absorb_loss(one.totals)
    denominator = sum(one.denominator for one in updates)
    norm = sum(one.norm for one in updates) / len(updates)
    found = first.metrics(1.0, grad_norm=norm, learning_rate=rate)
    learning = msgspec.structs.replace(
        found.learning, loss=together.sums.loss / denominator, optimizer_steps=len(updates)
    )
    signals = together.measured_signals(denominator)
    return msgspec.structs.replace(found, learning=learning, algorithm=signals)
