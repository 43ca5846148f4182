"""Finds out which other policy an engine sampled from, by scoring its tokens under candidates.

Slow, and needs memory for another copy of the weights; used only when something is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.rollout.trajectory import FloatArray, Trajectory
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.objective.logprob_mismatch import Disagreement, Limits, disagreement_of
from asyncrl.wire.records.wrong_policy import Cause

_NEWTON_STEPS = 6
_MAX_FACTOR = 100.0
"""Search range of temperatures, as a factor in both directions."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cause of the log-probabilities that an engine recorded."""

    cause: Cause
    text: str
    """Continues a sentence about the generator."""


def explain(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    limits: Limits,
    *,
    previous: Sequence[tuple[str, Tensor]],
    version: int,
) -> Explanation | None:
    """Find the policy that the tokens follow: another temperature, or the previous version.

    `trajectories` are suspicious ones, wholly of this version; `limits` say what rounding explains.
    `previous` are the previous version's weights by HF name, perhaps empty. Returns None if neither
    explains the tokens.
    """
    own = rescored(policy, trajectories).mean
    # An explanation leaves rounding only, and not much of what there was to explain.
    good = limits.mean if own <= limits.mean else min(limits.mean, own / 2)
    temperature = _temperature(policy, trajectories)
    at_that = rescored(policy, trajectories, temperature=temperature)
    if at_that.mean <= good:
        return Explanation(
            "temperature",
            f"it samples at temperature {temperature:.3g} instead of {policy.temperature:.3g}: "
            f"there the log-probabilities agree within {at_that.mean:.2g}",
        )
    if previous:
        before = rescored(policy, trajectories, weights=previous)
        if before.mean <= good:
            return Explanation(
                "lag",
                f"its tokens follow version {version - 1}, one step behind: with those weights the "
                f"log-probabilities agree within {before.mean:.2g}",
            )
    return None


@torch.no_grad()
def rescored(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    *,
    temperature: float | None = None,
    weights: Sequence[tuple[str, Tensor]] = (),
) -> Disagreement:
    """Compare the recorded log-probabilities with those of a changed policy.

    The policy is restored afterwards. `weights` are by HF name; by default it keeps its own.
    """
    found = Disagreement()
    with policy.changed(temperature, weights):
        for one in trajectories:
            scores = policy.score(_packed(policy, one))
            rows = disagreement_of(scores.logprobs, scores.entropy, [one], np.ones(1, bool))
            found += Disagreement.total(rows)
    return found


@torch.no_grad()
def logprobs_of(policy: Policy, trajectories: Sequence[Trajectory]) -> list[FloatArray]:
    """The policy's log-probabilities of each trajectory's trained tokens, in nats."""
    scores = (policy.score(_packed(policy, one)) for one in trajectories)
    return [one.logprobs.float().cpu().numpy() for one in scores]


def _packed(policy: Policy, trajectory: Trajectory) -> PackedBatch:
    """Pack one trajectory: several together may exceed a micro-batch that fits into memory."""
    return PackedBatch.of_samples([trajectory], policy.device)


def _temperature(policy: Policy, trajectories: Sequence[Trajectory]) -> float:
    """Fit the temperature of the recorded log-probabilities by Newton's method."""
    low, high = policy.temperature / _MAX_FACTOR, policy.temperature * _MAX_FACTOR
    temperature = policy.temperature
    for _ in range(_NEWTON_STEPS):
        slope = rescored(policy, trajectories, temperature=temperature).slope
        temperature = min(high, max(low, temperature * math.exp(slope)))
    return temperature
