"""The loss of a critic's values, and its signals. Pure.

With the value V of a token's state now, V_old its value when the step began, and its return R:

    loss = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

as in PPO's reference implementation (arXiv 1707.06347; c is `critic.value_clip`). In the first
optimizer step of a step V = V_old, and it is the squared error. Tokens are weighted as in the
policy's loss (`loss_normalization`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import LossSums, Signal

SIGNALS: Mapping[str, Signal] = {
    "value_loss": Signal("half the squared error of the critic's values, clipped", per="loss"),
    "value_clipped": Signal(
        "share of tokens whose value has no gradient because `critic.value_clip` was reached"
    ),
    "explained_variance": Signal(
        "share of the returns' variance that the critic's values of the step's start explain",
        per="explained",
    ),
}


def value_loss(
    values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> LossSums:
    """Summed loss and `SIGNALS` of `[N]` tokens; `old` values are of the step's start."""
    plain = (values - returns).square()
    worst, clipped = plain, torch.zeros_like(plain, dtype=torch.bool)
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        moved = (near - returns).square()
        worst = torch.maximum(plain, moved)
        beyond = (values - old).abs() > clip  # else they differ by rounding
        clipped = ((moved > plain) & beyond).detach() & (weights != 0)
    loss = 0.5 * (weights * worst).sum()
    error, target = (returns - old).double(), returns.double()
    moments = (error.sum(), error.square().sum(), target.sum(), target.square().sum())
    return LossSums(
        loss,
        {
            "value_loss": loss.detach(),
            "value_clipped": clipped.sum(),
            "explained_variance": torch.stack(moments),
        },
    )
