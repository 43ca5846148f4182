"""What a group must be so that it can be trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.trajectory import Trajectory
from trainer.errors import BatchError


def check_group(
    trajectories: Sequence[Trajectory],
    rewards: NDArray[np.float64],
    *,
    group_size: int,
    vocab_size: int,
    policy_version: int,
) -> int:
    """Refuse a group that cannot be trained on; returns its index.

    Args:
        trajectories: the distinct samples of one group.
        rewards: `[G]`, in the order of `trajectories`.
        group_size: G that the learner was made for.
        vocab_size: of the model; every token id must be below it.
        policy_version: the trainer's; no token may follow a newer one.

    Raises:
        BatchError: names the group or the sample, and what is wrong with it.
    """
    groups = {t.id.group for t in trajectories}
    samples = {t.id.sample for t in trajectories}
    if len(groups) != 1 or len(samples) != len(trajectories):
        raise BatchError(
            f"not the distinct samples of one group: {[str(t.id) for t in trajectories]}"
        )
    group = groups.pop()
    if not len(trajectories) == len(rewards) == group_size:
        raise BatchError(
            f"group {group}: {len(trajectories)} trajectories and {len(rewards)} rewards, "
            f"expected {group_size} of each"
        )
    if not np.isfinite(rewards).all():
        raise BatchError(f"group {group}: rewards must be finite, got {rewards.tolist()}")
    for trajectory in trajectories:
        _check_trajectory(trajectory, vocab_size, policy_version)
    return group


def _check_trajectory(trajectory: Trajectory, vocab_size: int, version: int) -> None:
    """Raises BatchError, naming the sample."""
    if not len(trajectory.prompt_tokens) or not len(trajectory.tokens):
        raise BatchError(f"trajectory {trajectory.id}: an empty prompt or response")
    for tokens in (trajectory.prompt_tokens, trajectory.tokens):
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise BatchError(
                f"trajectory {trajectory.id}: token ids must lie in [0, {vocab_size}), "
                f"got {tokens.min()} to {tokens.max()}: is the engine serving another model?"
            )
    if not np.isfinite(trajectory.behaviour_logprobs).all():
        raise BatchError(f"trajectory {trajectory.id}: behaviour log-probabilities not finite")
    newest = max(segment.policy_version for segment in trajectory.segments)
    if newest > version:
        raise BatchError(
            f"trajectory {trajectory.id}: drawn under version {newest}, "
            f"but the trainer is at {version}: was an old checkpoint restored?"
        )
