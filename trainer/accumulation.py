"""The gradient sums of one optimizer step, and what is measured with them.

```
groups ─► add ─► micro-batches ─► forward, loss, backward ─► .grad and parts += sums
                                                        └──► totals += sums
finish: factors of the step; gives the denominator
```

Everything is a sum until `finish`, so the order of groups and their split into micro-batches change
rounding only. `replay` trains on kept groups (`asyncrl.trainer.optimizer_updates`).

Where each rank holds some rows of the parameters, only a backward pass sums and divides their
gradients. So each further part of a loss gets its own backward pass there (`ShardedParts`). A rank
without work computes the same passes on a sample of padding, whose loss is 0 and not counted.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.algorithms.base import LossSums, Rewards, TokenBatch, to_device, token_batch
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import NonFiniteError
from asyncrl.trainer.critic import SIGNALS, Values, value_loss
from asyncrl.trainer.loss import GradientParts, Objective
from asyncrl.trainer.model.head import TokenScores
from asyncrl.trainer.objective.logprob_mismatch import SUMS, disagreement_of
from asyncrl.trainer.objective.step_statistics import StepTotals, TokenSums
from asyncrl.trainer.ranks import World
from asyncrl.trainer.scoring import Models
from asyncrl.trainer.sharding.lockstep import Lockstep
from asyncrl.trainer.step_targets import StepTargets, fix

_added: Callable[[Sequence[Any]], Any] = partial(reduce, operator.add)
_TOKENS = np.zeros(2, np.int32)


@dataclass(frozen=True, slots=True)
class Work:
    """B samples to compute, with their training targets."""

    trajectories: list[Trajectory]
    advantages: list[float]
    owners: list[tuple[int, int]]
    """`[B]` index of each sample's group among those added, and its place in the group."""
    is_padding: bool = False
    """True if nothing counts it (`asyncrl.trainer.accumulation`)."""

    def add(self, trajectories: Sequence[Trajectory], advantages: Rewards, group: int) -> None:
        """Add a whole group."""
        self.trajectories.extend(trajectories)
        self.advantages.extend(advantages.tolist())
        self.owners.extend((group, place) for place in range(len(trajectories)))

    def split(self, budget: int) -> Iterator["Work"]:
        """Split into micro-batches of at most `budget` tokens, longest samples first.

        In each, samples of a group are adjacent, so that they share their prompt.
        """
        lengths = [len(one.prompt_tokens) + len(one.tokens) for one in self.trajectories]
        for indices in split_by_tokens(lengths, budget):
            ordered = sorted(indices, key=lambda one: self.owners[one][0])
            yield Work(
                [self.trajectories[one] for one in ordered],
                [self.advantages[one] for one in ordered],
                [self.owners[one] for one in ordered],
            )

    def places(self, size: int) -> NDArray[np.int64]:
        """`[B]` place of each sample when whole groups of this size follow one another."""
        return np.array([group * size + place for group, place in self.owners], np.int64)


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences into micro-batches of at most `budget` tokens, by index, longest first.

    A longer sequence gets its own. Deterministic.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[index] > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def of_all_ranks(own: StepTotals, world: World) -> StepTotals:
    """Totals of the whole step, equal on all ranks; `own` is unchanged. Collective."""
    own.read()
    if world.size == 1:
        return own
    packed = msgspec.msgpack.encode({name: getattr(own, name) for name in _TOGETHER})
    found = [msgspec.msgpack.decode(one) for one in world.gather(packed, "the step's totals")]
    values = {name: rule([one[name] for one in found]) for name, rule in _TOGETHER.items()}
    return StepTotals(own.signals, **values)


def _by_column(rows: Sequence[list[float]]) -> list[float]:
    return [_added(column) for column in zip(*rows, strict=True)]


def _by_name(
    values: Sequence[dict[str, Any]], together: Callable[[Sequence[Any]], Any] = _added
) -> dict[str, Any]:
    names = dict.fromkeys(name for one in values for name in one)
    return {name: together([one[name] for one in values if name in one]) for name in names}


_TOGETHER: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("groups", "zero_variance_groups", "samples", "tokens", "observed"), _added),
    **dict.fromkeys(("truncated", "rewards", "staleness_sum", "computed"), _added),
    **dict.fromkeys(("staleness_max", "ratio_max", "abs_gap_max"), max),
    "centre": operator.itemgetter(0),
    "lengths": lambda values: _added([Counter(one) for one in values]),
    "sums": lambda values: TokenSums(*_by_column(values)),
    "signal_sums": partial(_by_name, together=_by_column),
    "part_sums": _by_name,
}
"""The rule that combines the ranks' values of a field. Left out: equal `signals`, unread sums."""


def padding(version: int) -> Work:
    """One sample of this policy version, with -1 as its group."""
    count = len(_TOKENS)
    builder = TrajectoryBuilder(SampleId(0, 0), "", _TOKENS[:1])
    builder.append(
        tokens=_TOKENS,
        logprobs=np.full(count, -1, np.float32),
        topk_ids=_TOKENS[:, None],
        topk_logprobs=np.full((count, 1), -1, np.float32),
        noise_seeds=np.zeros(count, np.uint64),
        provenance=np.full(count, Provenance.SAMPLED, np.uint8),
        policy_version=version,
    )
    return Work([builder.finish("stop")], [0.0], [(-1, 0)], is_padding=True)


def padded(work: Work, budget: int, lockstep: Lockstep, version: int) -> list[Work]:
    """Return the micro-batches of `work`, and padding to as many as any rank has. Collective."""
    parts = list(work.split(budget))
    return parts + [padding(version)] * (lockstep.most(len(parts)) - len(parts))


class ShardedParts(GradientParts):
    """`GradientParts` whose sums are of this rank's rows."""

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        aside = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        loss.backward(retain_graph=True)
        found = [one.grad for one in self._parameters]
        for one, grad in zip(self._parameters, aside, strict=True):
            one.grad = grad
        return found


class NewGroup(NamedTuple):
    """A complete, validated group."""

    group: int
    trajectories: Sequence[Trajectory]
    rewards: Rewards


@dataclass(frozen=True, slots=True)
class Kept:
    """A group of the current step, kept for later passes."""

    new: NewGroup
    silent: bool
    fixed: dict[int, StepTargets] = field(default_factory=dict)
    """Targets of the computed samples by their place in the group; empty if nothing is kept."""


class Accumulation:
    """Accumulates gradients in the `.grad` of the models' parameters.

    `keeps`: groups are trained on again. `centre` estimates the step's mean advantage on all ranks.
    """

    def __init__(
        self,
        config: TrainerConfig,
        objective: Objective,
        models: Models,
        lockstep: Lockstep,
        *,
        keeps: bool = False,
        centre: float = 0.0,
    ) -> None:
        self._config = config
        self._objective = objective
        self._models = models
        self._lockstep = lockstep
        self._keeps = keeps
        kind = ShardedParts if models.policy.is_sharded else GradientParts
        self._parts = kind(models.parameters())
        signals = objective.algorithm.signals
        self.totals = StepTotals({**signals, **(SIGNALS if models.critic else {})}, centre)
        self.groups: dict[int, Kept] = {}
        self._losses: list[tuple[tuple[int, ...], Tensor]] = []

    def add(self, groups: Sequence[NewGroup], version: int) -> list[Tensor]:
        """Run forward and backward for whole groups; only score them if `gathers_first`.

        Returns the rows of `Learner.add_groups`.
        """
        work = Work([], [], [])
        for index, one in enumerate(groups):
            advantages = self._objective.advantages(one.trajectories, one.rewards)
            kept = Kept(one, silent=self._objective.is_silent(advantages))
            if not (kept.silent and self._objective.skips_zero_variance):
                work.add(one.trajectories, advantages, index)
            self.groups[one.group] = kept
            self._count(kept, version)
        size, device = len(groups[0].trajectories), self._models.policy.device
        rows = torch.zeros((len(groups) * size, SUMS), dtype=torch.float64, device=device)
        for part in work.split(self._config.micro_batch_tokens):
            with self._lockstep.begin():
                found, fixed = self._micro_batch(part, version)
            rows[to_device(part.places(size), device)] = found
            if self._keeps and fixed is not None:
                lengths = [one.trained_count for one in part.trajectories]
                for (index, place), own in zip(part.owners, fixed.split(lengths), strict=True):
                    self.groups[groups[index].group].fixed[place] = own
        return list(rows.split(size))

    def replay(self, groups: Sequence[Kept], version: int, *, refers: bool = False) -> None:
        """Run forward and backward for kept groups; `refers`: score the reference too, and keep it.

        The policy and an equal reference give the same bits only in the same micro-batch. Other
        rounding would be a gradient, which AdamW turns into a change by the learning rate.
        """
        work = Work([], [], [])
        for index, kept in enumerate(groups):
            if kept.fixed:
                nothing = np.zeros(len(kept.new.trajectories))  # advantages are in `fixed`
                work.add(kept.new.trajectories, nothing, index)
            self._count(kept, version)
        for part in padded(work, self._config.micro_batch_tokens, self._lockstep, version):
            with self._lockstep.turn(is_empty=part.is_padding):
                scores, values = self._models.score(part.trajectories)
                reference = self._models.reference_logprobs(part.trajectories) if refers else None
                if part.is_padding:
                    fixed = self._fixed(part, scores, scores.logprobs.detach(), values)
                else:
                    each = [groups[index].fixed[place] for index, place in part.owners]
                    if reference is not None:
                        lengths = [one.trained_count for one in part.trajectories]
                        for own, its in zip(each, reference.split(lengths), strict=True):
                            own.reference_logprobs = its
                    fixed = StepTargets.of(each)
                batch = self._batch(scores, part, fixed)
                if self._objective.uses_proximal:
                    batch = replace(batch, proximal_logprobs=fixed.proximal_logprobs)
                self._train(batch, scores, values, fixed, part, version)

    def pad(self, version: int) -> None:
        """Compute padding while other ranks have groups (`trainer.sharding.lockstep`)."""
        with self._lockstep.turn(is_empty=True):
            self._micro_batch(padding(version), version)

    def finish(self, world: World) -> float:
        """Apply the factors that need the whole step; return the loss's denominator. Collective.

        Then `totals` are those of all ranks. All raise NonFiniteError if any loss is not finite.
        """
        self.totals = of_all_ranks(self.totals, world)
        self._refuse_losses_that_are_not_finite()
        return self._objective.finish(self.totals, self._parts)

    def _micro_batch(self, work: Work, version: int) -> tuple[Tensor, StepTargets | None]:
        """Run the first pass of some samples; return `[B, SUMS]`, unread."""
        some, train = work.trajectories, not self._config.gathers_first
        with torch.set_grad_enabled(train):
            scores, values = self._models.score(some)
        is_needed = train or self._objective.has_reference_in_reward
        reference = self._models.reference_logprobs(some) if is_needed else None
        fixed = None
        if self._keeps or values is not None:
            fixed = self._fixed(work, scores, reference, values)
        batch = self._batch(scores, work, fixed if values is not None else None)
        batch = replace(batch, reference_logprobs=reference)
        if train:
            self._train(batch, scores, values, fixed, work, version)
        elif not work.is_padding:
            self.totals.add_tokens(batch, scores, self._nothing(), self._fresh(some, version))
        current = np.array([one.oldest_version == version for one in some])
        return disagreement_of(scores.logprobs, scores.entropy, some, current), fixed

    def _fixed(
        self, work: Work, scores: TokenScores, reference: Tensor | None, values: Values | None
    ) -> StepTargets:
        penalty = self._objective.penalty_in_reward(scores.logprobs, reference)
        each, critic = np.array(work.advantages), self._config.critic
        return fix(work.trajectories, each, scores.logprobs, reference, penalty, values, critic)

    def _batch(self, scores: TokenScores, work: Work, fixed: StepTargets | None) -> TokenBatch:
        batch = token_batch(
            scores.logprobs,
            work.trajectories,
            np.array(work.advantages),
            self._config.loss_normalization,
            masks_truncated=self._config.mask_truncated_completions,
        )
        batch = replace(batch, routes=scores.routes, centre=self.totals.centre)
        if work.is_padding:
            batch = replace(batch, weights=torch.zeros_like(batch.weights))  # nothing counts them
        if fixed is None:
            return batch
        now, reference = fixed.advantages, fixed.reference_logprobs
        return replace(batch, advantages=now, reference_logprobs=reference, penalised=True)

    def _train(
        self,
        batch: TokenBatch,
        scores: TokenScores,
        values: Values | None,
        fixed: StepTargets | None,
        work: Work,
        version: int,
    ) -> None:
        sums = self._objective.algorithm.loss(batch)
        if values is not None and fixed is not None:
            sums = self._with_values(sums, values, fixed, batch.weights)
        if work.is_padding:  # as many parts, whose gradients are 0
            parts = {name: 0.0 * one for name, one in sums.parts.items()}
            sums = LossSums(0.0 * sums.loss, sums.sums, parts)
        self._parts.add(sums.parts)
        sums.loss.backward()
        if work.is_padding:
            return
        some = work.trajectories
        self._losses.append((tuple(sorted({t.id.group for t in some})), sums.loss.detach()))
        self.totals.add_tokens(batch, scores, sums, self._fresh(some, version))

    def _with_values(
        self, sums: LossSums, values: Values, fixed: StepTargets, weights: Tensor
    ) -> LossSums:
        assert fixed.values is not None and fixed.returns is not None  # noqa: S101, PT018
        critic = self._config.critic
        found = value_loss(values.tokens, fixed.values, fixed.returns, weights, critic.value_clip)
        loss = critic.value_coefficient * found.loss
        both = replace(sums, sums={**sums.sums, **found.sums})
        if not critic.shared_trunk:
            loss.backward()
            return both
        return both.plus(self._objective.algorithm, "value_loss", loss)

    def _nothing(self) -> LossSums:
        """Signals reported for tokens that were only scored."""
        device = self._models.policy.device
        one = torch.zeros((), dtype=torch.float64, device=device)
        return LossSums(one, {n: one.expand(s.size) for n, s in self.totals.signals.items()})

    def _fresh(self, some: Sequence[Trajectory], version: int) -> Tensor:
        stale = np.concatenate([one.staleness(version)[one.trained] for one in some])
        return to_device(stale == 0, self._models.policy.device)

    def _count(self, kept: Kept, version: int) -> None:
        _, some, rewards = kept.new
        self.totals.add_group(some, rewards, policy_version=version, zero_variance=kept.silent)

    def _refuse_losses_that_are_not_finite(self) -> None:
        """Check the losses once a step: reading one makes the host wait for the device."""
        self.totals.read()
        loss = sum([self.totals.sums.loss, *self.totals.signal_sums.get("value_loss", [])])
        if math.isfinite(loss):
            return
        for groups, one in self._losses:
            if not math.isfinite(value := float(one)):
                named = f"group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))}"
                raise NonFiniteError(f"the loss of {named} is {value}")
        raise NonFiniteError(f"the loss is {loss}, because of the critic or another rank's groups")
