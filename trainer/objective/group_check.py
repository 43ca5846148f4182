"""Validation of groups before training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import Provenance, Trajectory
from asyncrl.trainer.base.errors import BatchError

_ROUNDING = 1e-3
"""Tolerance for positive log-probabilities caused by rounding, in nats."""
_LAST_PROVENANCE = int(max(Provenance))


def check_group(
    trajectories: Sequence[Trajectory],
    rewards: NDArray[np.float64],
    *,
    group_size: int,
    vocab_size: int,
    policy_version: int,
) -> int:
    """Check the distinct samples of a group and their rewards `[G]`; return the group's index.

    Raises BatchError, which names the group or sample and what is wrong. No token may follow a
    newer policy than `policy_version`.
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
        check_trajectory(trajectory, vocab_size, policy_version)
    return group


def check_trajectory(trajectory: Trajectory, vocab_size: int, version: int) -> None:
    """Raise BatchError, naming the sample and the fault, if it cannot be trained on."""
    name = f"trajectory {trajectory.id}"
    if not len(trajectory.prompt_tokens) or not len(trajectory.tokens):
        raise BatchError(f"{name}: the prompt or the response is empty")
    for tokens in (trajectory.prompt_tokens, trajectory.tokens):
        first, last = tokens.min(), tokens.max()
        if first < 0 or last >= vocab_size:
            raise BatchError(
                f"{name}: token ids must lie in [0, {vocab_size}), "
                f"got {first} to {last}: is the engine serving another model?"
            )
    lowest, highest = trajectory.behaviour_logprobs.min(), trajectory.behaviour_logprobs.max()
    if not (math.isfinite(lowest) and math.isfinite(highest)):  # a NaN is both
        raise BatchError(f"{name}: behaviour log-probabilities are not finite")
    if highest > _ROUNDING:
        raise BatchError(f"{name}: a behaviour log-probability of {highest:.3g} is above 0")
    provenance = trajectory.provenance.max()
    if provenance > _LAST_PROVENANCE:
        raise BatchError(f"{name}: {provenance} is not a valid Provenance value")
    _check_observed(trajectory, name)
    _check_segments(trajectory, name)
    newest = trajectory.segments[-1].policy_version
    if newest > version:
        raise BatchError(
            f"{name}: drawn under version {newest}, "
            f"but the trainer is at {version}: was an old checkpoint restored?"
        )


def _check_observed(trajectory: Trajectory, name: str) -> None:
    """Check that observed tokens have log-probability 0, begin each context, and are not all."""
    trained = trajectory.trained
    if not trained.any():
        raise BatchError(f"{name}: every token is observed, so there is nothing to train on")
    wrong = np.flatnonzero(~trained & (trajectory.behaviour_logprobs != 0))
    if len(wrong):
        at = int(wrong[0])
        raise BatchError(
            f"{name}: token {at} is observed, so its log-probability is 0, "
            f"not {trajectory.behaviour_logprobs[at]:.3g}"
        )
    before = 0
    for place in trajectory.contexts:
        if not before < place < len(trained) or trained[place]:
            raise BatchError(
                f"{name}: a context must begin with an observed token after the one before it, "
                f"but the contexts begin at {list(trajectory.contexts)} of {len(trained)} tokens"
            )
        before = place


def _check_segments(trajectory: Trajectory, name: str) -> None:
    """Check that segments cover the response without gaps, and versions do not fall."""
    end, version = 0, trajectory.oldest_version
    for segment in trajectory.segments:
        if segment.start != end or segment.end <= end or segment.policy_version < version:
            raise BatchError(
                f"{name}: segments must cover the response in order, with versions that do not "
                f"fall, but after token {end} of version {version} comes {segment}"
            )
        end, version = segment.end, segment.policy_version
    if end != len(trajectory.tokens):
        raise BatchError(f"{name}: segments cover {end} of {len(trajectory.tokens)} tokens")
