"""The critic's own passes over the groups of a step (`critic.passes`); the policy stays as it is.

Returns and old values are those of the step's start, as in the first pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from asyncrl.trainer.accumulation import Kept
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.critic import Critic
from asyncrl.trainer.model.device_copy import to_device
from asyncrl.trainer.model.micro_batches import Work
from asyncrl.trainer.model.normalization import denominator
from asyncrl.trainer.model.token_batch import weights_of
from asyncrl.trainer.objective.value_loss import value_loss
from asyncrl.trainer.ranks import World
from asyncrl.trainer.step_targets import Fixed


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
