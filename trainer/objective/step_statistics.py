"""The sums of one optimizer step, and the record made of them.

Sums over tokens stay on the device until the step ends: reading one makes the host wait for it.
"""

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import CUT_OFF, Trajectory
from asyncrl.trainer.algorithms.base import Finish, LossSums, Signal, StepSums, TokenBatch
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.model.head import TokenScores
from asyncrl.wire.records.step import (
    BatchMetrics,
    LearnerMetrics,
    LearningMetrics,
    Measured,
    MismatchMetrics,
    StalenessMetrics,
)

_PART = "part of the loss: "
"""Prefix of a part's name, where signals and parts are read from the device together."""


class TokenSums(NamedTuple):
    """Sums over computed tokens. `gap` is current minus behaviour log-probability, in nats."""

    loss: float = 0.0
    entropy: float = 0.0
    outside_nucleus: float = 0.0
    ratio: float = 0.0
    abs_gap: float = 0.0
    kl: float = 0.0
    fresh: float = 0.0
    """Tokens of staleness 0; the two sums below are over these."""
    fresh_abs_gap: float = 0.0
    fresh_kl: float = 0.0


class _OnDevice(NamedTuple):
    names: tuple[tuple[str, int], ...]
    sums: Tensor
    """`[K]` float64: the fields of `TokenSums`, then those of `names`."""
    peaks: Tensor
    """`[2]` float64: largest ratio, largest |gap|."""


@dataclass(slots=True)
class StepTotals:
    """Sums over the groups since the last step. Their order changes rounding only.

    Call `read` first: sums over tokens include only what was read.
    """

    signals: Mapping[str, Signal]
    centre: float = 0.0
    groups: int = 0
    zero_variance_groups: int = 0
    samples: int = 0
    tokens: int = 0
    """Trained tokens, skipped groups included: the token-level denominator."""
    observed: int = 0
    """Response tokens that no policy drew; no other count includes them."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by `rounded_length`."""
    truncated: int = 0
    """Samples that ended at the token limit or a deadline."""
    rewards: list[float] = field(default_factory=list)
    staleness_sum: float = 0.0
    staleness_max: int = 0
    computed: int = 0
    """Trained tokens that went through the model."""
    sums: TokenSums = field(default_factory=TokenSums)
    signal_sums: dict[str, list[float]] = field(default_factory=dict)
    """Sums by name; two numbers for a signal that is `effective`, four if `explained`, else one."""
    part_sums: dict[str, float] = field(default_factory=dict)
    ratio_max: float = 0.0
    abs_gap_max: float = 0.0
    _unread: _OnDevice | None = None

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
            staleness = trajectory.staleness(policy_version)[trajectory.trained]
            self.observed += len(trajectory.tokens) - len(staleness)
            self.tokens += len(staleness)
            self.lengths[rounded_length(len(staleness))] += 1
            self.truncated += trajectory.finish_reason in CUT_OFF
            self.staleness_sum += float(staleness.sum())
            self.staleness_max = max(self.staleness_max, int(staleness.max()))

    @torch.no_grad()
    def add_tokens(
        self, batch: TokenBatch, scores: TokenScores, loss: LossSums, fresh: Tensor
    ) -> None:
        """Add one computed micro-batch; `fresh` is `[N]` bool, staleness 0.

        Raises TrainerError unless the loss reports exactly the signals that its algorithm declares.
        """
        if loss.sums.keys() != self.signals.keys():
            raise TrainerError(
                f"the algorithm declares the signals {sorted(self.signals)}, but its loss returned "
                f"{sorted(loss.sums)}; make `signals` and the sums of `loss` the same"
            )
        gap = batch.logprobs.detach().double() - batch.behaviour_logprobs.double()
        ratio = gap.exp()
        # k3 of Schulman's "Approximating KL divergence": unbiased for KL(behaviour || current).
        kl = ratio - 1 - gap
        by_token = (scores.outside, ratio, gap.abs(), kl, fresh, gap.abs() * fresh, kl * fresh)
        sums = (loss.loss, scores.entropy.double().sum(), *(one.sum() for one in by_token))
        reported = {**loss.sums, **{f"{_PART}{name}": one for name, one in loss.parts.items()}}
        new = _OnDevice(
            tuple((name, one.numel()) for name, one in reported.items()),
            torch.cat([one.detach().double().reshape(-1) for one in (*sums, *reported.values())]),
            torch.stack([ratio.max(), gap.abs().max()]),
        )
        self.computed += len(gap)
        if self._unread is not None and self._unread.names != new.names:
            self.read()
        if self._unread is not None:
            sum_, peaks = self._unread.sums + new.sums, self._unread.peaks.maximum(new.peaks)
            new = _OnDevice(new.names, sum_, peaks)
        self._unread = new

    def read(self) -> None:
        """Read the sums from the device in one transfer, which waits for all that was computed."""
        if self._unread is None:
            return
        (names, sums, peaks), self._unread = self._unread, None
        values = torch.cat([sums, peaks]).tolist()
        self.sums = TokenSums(*map(operator.add, self.sums, values))
        self.ratio_max = max(self.ratio_max, values[-2])
        self.abs_gap_max = max(self.abs_gap_max, values[-1])
        rest = iter(values[len(TokenSums._fields) :])
        for name, count in names:
            new = [next(rest) for _ in range(count)]
            if name.startswith(_PART):
                part = name.removeprefix(_PART)
                self.part_sums[part] = self.part_sums.get(part, 0.0) + new[0]
            else:
                old = self.signal_sums.get(name, [0.0] * count)
                self.signal_sums[name] = list(map(operator.add, old, new))

    def absorb_loss(self, other: Self) -> None:
        """Add the loss, signals and computed tokens of another optimizer step."""
        self.computed += other.computed
        self.sums = self.sums._replace(loss=self.sums.loss + other.sums.loss)
        for name, sums in other.signal_sums.items():
            old = self.signal_sums.get(name, [0.0] * len(sums))
            self.signal_sums[name] = list(map(operator.add, old, sums))

    def whole(self) -> StepSums:
        """Return the sums for an algorithm's `finish`."""
        self.read()
        sums = {name: sums[0] for name, sums in self.signal_sums.items()}
        return StepSums(self.groups, self.zero_variance_groups, self.computed, sums, self.centre)

    def finish(self, factors: Finish) -> None:
        """Combine the reported loss as `GradientParts.finish` does the gradient."""
        self.read()
        loss = factors.scale * self.sums.loss
        loss += sum(factors.parts.get(name, 1.0) * one for name, one in self.part_sums.items())
        self.sums = self.sums._replace(loss=loss)
        parts = self.part_sums
        own = sum(factor * parts.get(name, 0.0) for name, factor in factors.parts.items())
        for name, sums in self.signal_sums.items():
            if self.signals[name].of_loss:
                sums[0] = factors.scale * sums[0] + own

    def metrics(
        self, denominator: float, *, grad_norm: float, learning_rate: float
    ) -> LearnerMetrics:
        """Build the step's record; `denominator` is that of the loss."""
        self.read()
        rewards = np.asarray(self.rewards or [0.0])
        samples, staleness = max(self.samples, 1), self.staleness_sum / max(self.tokens, 1)
        return LearnerMetrics(
            learning=LearningMetrics(
                reward_mean=float(rewards.mean()),
                reward_std=float(rewards.std()),
                loss=self.sums.loss / denominator,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                entropy=_mean(self.sums.entropy, self.computed),
            ),
            batch=BatchMetrics(
                groups=self.groups,
                zero_variance_groups=self.zero_variance_groups,
                samples=self.samples,
                tokens=self.tokens,
                tokens_observed=self.observed,
                tokens_computed=self.computed,
                response_length_mean=self.tokens / samples,
                response_lengths=dict(sorted(self.lengths.items())),
                truncated_share=self.truncated / samples,
            ),
            staleness=StalenessMetrics(mean=staleness, max=self.staleness_max),
            mismatch=self._mismatch(),
            algorithm=self.measured_signals(denominator),
        )

    def measured_signals(self, denominator: float) -> dict[str, Measured]:
        """Every declared signal; None on a step without computed tokens."""
        if not self.computed:
            return dict.fromkeys(self.signals)
        return {
            name: self._signal(signal, self.signal_sums[name], denominator)
            for name, signal in self.signals.items()
        }

    def _signal(self, signal: Signal, sums: list[float], denominator: float) -> Measured:
        if signal.per == "effective":
            total, squares = sums
            return _mean(total**2, self.computed * squares)
        if signal.per == "explained":
            return _explained(sums, self.computed)
        return _mean(sums[0], self.computed if signal.per == "token" else denominator)

    def _mismatch(self) -> MismatchMetrics:
        sums, computed = self.sums, self.computed
        return MismatchMetrics(
            abs_mean=_mean(sums.abs_gap, computed),
            abs_max=_measured(self.abs_gap_max, computed),
            kl=_mean(sums.kl, computed),
            fresh_abs_mean=_mean(sums.fresh_abs_gap, sums.fresh),
            fresh_kl=_mean(sums.fresh_kl, sums.fresh),
            ratio_mean=_mean(sums.ratio, computed),
            ratio_max=_measured(self.ratio_max, computed),
            outside_nucleus=_mean(sums.outside_nucleus, computed),
        )


def _explained(sums: list[float], count: int) -> Measured:
    """1 - var(e) / var(R), or None where all targets R are alike."""
    error, errors, target, targets = (one / count for one in sums)
    spread = targets - target**2
    return None if spread <= 1e-12 * targets else 1 - (errors - error**2) / spread


def rounded_length(tokens: int) -> int:
    """Round a length down to 8 significant bits, as `BatchMetrics.response_lengths` counts it."""
    shift = max(0, tokens.bit_length() - 8)
    return tokens >> shift << shift


def _measured(value: float, count: float) -> Measured:
    """The value, or None where nothing was counted or it is not finite."""
    return value if count and math.isfinite(value) else None


def _mean(total: float, count: float) -> Measured:
    """`total / count`, or None where nothing was counted or the result is not finite."""
    return _measured(total / count, count) if count else None
