"""The sums of one optimizer step while its groups stream in, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.trajectory import Trajectory
from trainer.algorithms.base import LossSums, TokenBatch
from trainer.policy import TokenScores

SUMS = (
    "policy_loss",
    "kl_loss",
    "kl",
    "entropy",
    "clipped",
    "capped",
    "outside",
    "ratio",
    "mismatch",
    "mismatch_kl",
    "fresh",
    "fresh_mismatch",
    "fresh_mismatch_kl",
    "scored",
)


@dataclass(slots=True)
class StepTotals:
    """Sums over what arrived since the last step. Order of arrival changes rounding only."""

    groups: int = 0
    zero_variance_groups: int = 0
    samples: int = 0
    tokens: int = 0
    """Response tokens, skipped groups included: the token-level denominator."""
    truncated: int = 0
    """Samples that ended at the token limit."""
    rewards: list[float] = field(default_factory=list)
    staleness_sum: float = 0.0
    staleness_max: int = 0
    ratio_max: float = 0.0
    mismatch_max: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    """Over the tokens that were computed (`scored` of them), by the names in `SUMS`."""

    def add_group(
        self,
        trajectories: Sequence[Trajectory],
        rewards: NDArray[np.float64],
        *,
        policy_version: int,
        zero_variance: bool,
    ) -> None:
        """Count a group, computed or not."""
        self.groups += 1
        self.zero_variance_groups += zero_variance
        self.samples += len(trajectories)
        self.rewards += [float(reward) for reward in rewards]
        for trajectory in trajectories:
            staleness = trajectory.staleness(policy_version)
            self.tokens += len(staleness)
            self.truncated += trajectory.finish_reason in ("length", "deadline")
            self.staleness_sum += float(staleness.sum())
            self.staleness_max = max(self.staleness_max, int(staleness.max()))

    @torch.no_grad()
    def add_tokens(
        self, batch: TokenBatch, scores: TokenScores, loss: LossSums, fresh: Tensor
    ) -> None:
        """Add one computed micro-batch; `fresh` is `[N]` bool, staleness 0."""
        gap = batch.logprobs.detach().double() - batch.behaviour_logprobs.double()
        ratio = gap.exp()
        # k3 of Schulman's "Approximating KL divergence": unbiased for KL(behaviour || current).
        divergence = ratio - 1 - gap
        values = {
            "policy_loss": loss.loss,
            "entropy": scores.entropy.double().sum(),
            "clipped": loss.clipped,
            "capped": loss.capped,
            "outside": scores.outside.sum(),
            "ratio": ratio.sum(),
            "mismatch": gap.abs().sum(),
            "mismatch_kl": divergence.sum(),
            "fresh": fresh.sum(),
            "fresh_mismatch": (gap.abs() * fresh).sum(),
            "fresh_mismatch_kl": (divergence * fresh).sum(),
        }
        # One transfer from the device for all of them.
        columns = torch.stack([v.detach().double() for v in values.values()])
        peaks = torch.stack([ratio.max(), gap.abs().max()])
        numbers = torch.cat([columns, peaks]).tolist()
        for name, value in zip(values, numbers, strict=False):
            self.sums[name] += value
        self.sums["scored"] += len(gap)
        self.ratio_max = max(self.ratio_max, numbers[-2])
        self.mismatch_max = max(self.mismatch_max, numbers[-1])

    def metrics(self, denominator: float) -> dict[str, float]:
        """Means and counts, all float; means over no tokens are 0."""
        sums = self.sums
        scored = max(sums["scored"], 1.0)
        fresh = max(sums["fresh"], 1.0)
        rewards = np.asarray(self.rewards or [0.0])
        samples = max(self.samples, 1)
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "loss": (sums["policy_loss"] + sums["kl_loss"]) / denominator,
            "policy_loss": sums["policy_loss"] / denominator,
            "kl": sums["kl"] / scored,
            "entropy": sums["entropy"] / scored,
            "clip_ratio": sums["clipped"] / scored,
            "importance_capped": sums["capped"] / scored,
            "importance_ratio_mean": sums["ratio"] / scored if sums["scored"] else 1.0,
            "importance_ratio_max": self.ratio_max if sums["scored"] else 1.0,
            "outside_nucleus": sums["outside"] / scored,
            "mismatch": sums["mismatch"] / scored,
            "mismatch_max": self.mismatch_max,
            "mismatch_kl": sums["mismatch_kl"] / scored,
            "mismatch_fresh": sums["fresh_mismatch"] / fresh,
            "mismatch_fresh_kl": sums["fresh_mismatch_kl"] / fresh,
            "response_length_mean": self.tokens / samples,
            "truncated_share": self.truncated / samples,
            "staleness_mean": self.staleness_sum / max(self.tokens, 1),
            "staleness_max": float(self.staleness_max),
            "tokens": float(self.tokens),
            "tokens_computed": sums["scored"],
            "groups": float(self.groups),
            "zero_variance_groups": float(self.zero_variance_groups),
        }
