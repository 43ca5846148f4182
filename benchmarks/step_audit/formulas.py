"""The published formulas, one sample at a time, in float64. N: the sample's drawn tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in gradients.values()))


class AdamW:
    """Weights and moments by parameter, as a checkpoint has them.

    Attribute: `start`, the first weights.
    """

    def __init__(
        self, weights: Tensors, moments: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
        self.start, self.weights, self._settings = dict(weights), weights, settings
        self.moments = {name: one.double() for name, one in moments.items()}

    def step(self, gradients: Mapping[str, Tensor], rate: float) -> float:
        """Clip, and change weights and moments; gives the norm before clipping."""
        c, norm = self._settings, norm_of(gradients)
        factor = min(1.0, c["max_grad_norm"] / norm) if norm else 1.0
        first, second = c["betas"]
        for name, weight in self.weights.items():
            gradient = gradients[name] * factor
            mean = self.moments.get(f"{name}/exp_avg", gradient * 0)
            square = self.moments.get(f"{name}/exp_avg_sq", gradient * 0)
            count = float(self.moments.get(f"{name}/step", 0)) + 1
            mean = first * mean + (1 - first) * gradient
            square = second * square + (1 - second) * gradient**2
            decay = c["weight_decay"] if weight.ndim >= 2 else 0.0
            root = (square / (1 - second**count)).sqrt() + c["adam_epsilon"]
            new = weight - rate * decay * weight - rate * mean / (1 - first**count) / root
            self.weights[name] = new.detach()
            self.moments[f"{name}/exp_avg"] = mean
            self.moments[f"{name}/exp_avg_sq"] = square
            self.moments[f"{name}/step"] = gradient.new_tensor(count)
        return norm


Settings = Mapping[str, Any]
"""The section `trainer:` of a resolved configuration."""


@dataclass(slots=True)
class Tokens:
    """What a loss takes of a sample."""

    current: Tensor
    """`[N]` log-probabilities; the gradient flows here."""
    behaviour: Tensor
    """`[N]` of the policies that drew the tokens."""
    advantages: Tensor
    """`[N]`."""
    proximal: Tensor | None = None
    """`[N]` of the step's start; None: that is the current policy."""
    reference: Tensor | None = None


@dataclass(slots=True)
class Judged:
    losses: Tensor
    """The policy's, without KL."""
    weight: Tensor
    """What the correction gives."""
    kept: Tensor
    ratio: Tensor
    """Current (or proximal) over behaviour probability, clamped."""
    signals: dict[str, Tensor]


def group_advantages(c: Settings, rewards: np.ndarray) -> np.ndarray:
    """Of a group's samples, before anything is normalised over the step."""
    name, size = c["algorithm"], len(rewards)
    if name in ("ppo", "reinforce_plus_plus"):
        return rewards
    if (rewards == rewards[0]).all():
        return np.zeros(size)
    if name in ("reinforce", "rloo"):
        return np.array([r - (rewards.sum() - r) / (size - 1) for r in rewards])
    centred = np.asarray(rewards - rewards.sum() / size)
    if name in ("reinforce_plus_plus_baseline", "gpg") or c["advantage_normalization"] == "none":
        return centred
    std = math.sqrt((centred**2).sum() / (size - 1))
    return np.asarray(centred / (std + 1e-6))


def overlong(c: Settings, length: int, longest: int) -> float:
    buffer = c["overlong_buffer"]
    if not buffer or length <= longest - buffer:
        return 0.0
    return (longest - buffer - length) / buffer if length < longest else -1.0


def gae(
    rewards: Sequence[float], values: Sequence[float], end: float, gamma: float, lam: float
) -> list[float]:
    """Generalised advantage estimates: 1506.02438, equation 16, as a double sum."""
    after = [*values[1:], end]
    deltas = [r + gamma * b - v for r, b, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def correction(c: Settings, g: Tensor) -> tuple[Tensor, Tensor]:
    """`[N]` weights and whether tokens are kept, of log-ratios g."""
    name, cap, ones = c["correction"], c["importance_cap"], torch.ones_like(g)
    low, high = c["correction_band"] or (
        (0.99, 1.01) if name == "sequence_rejected" else (0.5, 5.0)
    )
    of = {"token": g, "sequence": g.sum() * ones, "none": g}[name.split("_")[0]].exp()
    if name == "none":
        return ones, ones
    if name.endswith("truncated"):
        return of.clamp(max=cap), ones
    judged, weight = of, of
    if name == "sequence_rejected":
        judged, weight = g.mean().exp() * ones, g.exp().clamp(max=cap)
    kept = ((judged >= low) & (judged <= high)).to(g)
    return weight * kept, kept


def judged(c: Settings, t: Tokens) -> Judged:
    """The policy's losses of a sample's tokens, with the algorithm's signals."""
    name, a, p = c["algorithm"], t.advantages, t.current
    start = p.detach() if t.proximal is None else t.proximal
    g = start - t.behaviour
    if (bound := c["log_ratio_clamp"]) is not None:
        g = g.clamp(-bound, bound)
    weight, kept = correction(c, g)
    behaviour = start - g
    low, high, signals = 1 - c["clip_ratio_low"], 1 + c["clip_ratio_high"], {}
    of = g.sum() * torch.ones_like(g) if c["correction"] == "sequence_truncated" else g
    cuts = c["correction"].endswith(("truncated", "rejected"))
    capped = (of.exp() > c["importance_cap"]) & (kept > 0) & cuts
    if name in ("reinforce", "rloo", "gpg"):
        losses = -weight * a * p
    elif name.startswith("reinforce_plus_plus"):
        losses = -weight * a * (p - p.detach()).exp()
    elif name == "cispo":
        ratio = (p.detach() - behaviour).exp()
        losses = -kept * ratio.clamp(low, high) * a * p
        signals["weight_clipped"] = ((ratio < low) | (ratio > high)) & (kept > 0)
    else:
        inner = p - (start if c["proximal_policy"] == "current" else behaviour)
        if bound is not None:  # of the value; the gradient stays
            inner = inner - inner.detach() + inner.detach().clamp(-bound, bound)
        ratio = inner.exp() if name != "gspo" else inner.mean().exp() * torch.ones_like(p)
        gain = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        clipped = ((ratio > high) & (a > 0)) | ((ratio < low) & (a < 0))
        over = torch.zeros_like(clipped)
        if c["dual_clip"] is not None:
            over = (a < 0) & (gain < c["dual_clip"] * a)
            gain = torch.where(over, c["dual_clip"] * a, gain)
        losses = -(weight if c["proximal_policy"] == "current" else kept) * gain
        signals["clip_ratio"] = (clipped | over) & (kept > 0)
        if name != "gspo":
            signals["dual_clipped"] = over & (kept > 0)
    if c["proximal_policy"] == "current":
        signals["importance_capped"] = capped
    return Judged(losses, weight, kept, g.exp(), signals)


def kl(c: Settings, current: Tensor, reference: Tensor) -> Tensor:
    log_ratio, bound = current - reference, c["kl_clamp"]
    if c["kl_estimator"] == "k1":
        return log_ratio if bound is None else log_ratio.clamp(-bound, bound)
    found = log_ratio**2 / 2 if c["kl_estimator"] == "k2" else (-log_ratio).exp() - 1 + log_ratio
    return found if bound is None else found.clamp(max=bound)


def learning_rate(c: Settings, step: int, steps: int) -> float:
    """Linear warm-up, then constant, cosine or linear."""
    peak, warm = c["learning_rate"], c["warmup_steps"]
    if step < warm:
        return float(peak * (step + 1) / (warm + 1))
    done = min(1.0, (step - warm) / ((c["schedule_steps"] or steps) - warm))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    low = 0.0 if c["learning_rate_schedule"] == "constant" else c["learning_rate_minimum"]
    return float(low + (peak - low) * shape[c["learning_rate_schedule"]])
