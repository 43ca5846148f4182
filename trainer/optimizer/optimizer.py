"""AdamW, its learning rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import NonFiniteError, TrainerError
from asyncrl.trainer.optimizer.adamw import SmallAdamW

_KEPT_AS = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.uint8}


def learning_rate(
    config: TrainerConfig,
    step: int,
    total_steps: int | None,
    peaks: Mapping[int, float] = MappingProxyType({}),
) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule.

    `peaks` replaces the configured peak, by the first step with each value. The shape stays.

    Raises:
        TrainerError: cosine or linear has no last step, or one inside the warm-up.
    """
    peak = peaks[max(past)] if (past := [one for one in peaks if one <= step]) else None
    peak = config.learning_rate if peak is None else peak
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.learning_rate_schedule == "constant":
        return peak
    end = config.schedule_steps or total_steps
    if end is None or end <= config.warmup_steps:
        raise TrainerError(
            f"trainer.learning_rate_schedule {config.learning_rate_schedule!r} needs a last step "
            f"after the warm-up of {config.warmup_steps}, got {end}: set trainer.schedule_steps"
        )
    progress = min(1.0, (step - config.warmup_steps) / (end - config.warmup_steps))
    share = 1 - progress
    if config.learning_rate_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    span = peak - config.learning_rate_minimum
    return config.learning_rate_minimum + span * share


def make_adamw(
    parameters: Sequence[Tensor], config: TrainerConfig, matrices: Sequence[bool] | None = None
) -> torch.optim.Optimizer:
    """AdamW; weight decay applies to matrices, not to norms and biases.

    torch's fused one, on the CPU too, unless moments are in fewer bits or on the host.

    Args:
        parameters: that it changes, or a rank's rows of them.
        config: the trainer's settings.
        matrices: which of them are matrices; None: those of two dimensions or more.
    """
    if matrices is None:
        matrices = [one.ndim >= 2 for one in parameters]
    kinds = list(zip(parameters, matrices, strict=True))
    groups = [
        {"params": [p for p, matrix in kinds if matrix], "weight_decay": config.weight_decay},
        {"params": [p for p, matrix in kinds if not matrix], "weight_decay": 0.0},
    ]
    present = [group for group in groups if group["params"]]
    rate, betas, epsilon = config.learning_rate, config.betas, config.adam_epsilon
    if config.optimizer_state != "float32" or config.optimizer_offload:
        return SmallAdamW(
            present,
            lr=rate,
            betas=betas,
            eps=epsilon,
            moments=_KEPT_AS[config.optimizer_state],
            on_host=config.optimizer_offload,
        )
    return torch.optim.AdamW(present, lr=rate, betas=betas, eps=epsilon, fused=True)


def scale_and_clip(
    parameters: Iterable[Tensor],
    denominator: float,
    max_norm: float,
    norm_of_all: Callable[[float], float] = float,
) -> float:
    """Divide summed gradients by the denominator and clip their global norm; returns the norm.

    The returned norm is that before clipping. It is computed from the sums, so that both factors
    are applied in one pass. `norm_of_all` makes it of the norm of these parameters, where other
    ranks have the others.

    Raises:
        NonFiniteError: the norm is not finite; the gradients are unchanged.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
    norm = norm_of_all(norm) / denominator
    if not math.isfinite(norm):
        raise NonFiniteError(f"the gradient's norm is {norm}")
    factor = min(1.0, max_norm / (norm + 1e-12)) / denominator
    for grad in grads:
        grad.mul_(factor)
    return norm


def take_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    rate: float,
    denominator: float,
    max_norm: float,
    norm_of_all: Callable[[float], float] = float,
) -> float:
    """Divide the summed gradients, clip them and step; returns their norm before clipping.

    Raises:
        NonFiniteError: a gradient is not finite; the weights are unchanged.
    """
    for parameter in parameters:
        # AdamW skips a parameter without gradient, momentum and decay included.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = scale_and_clip(parameters, denominator, max_norm, norm_of_all)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm
