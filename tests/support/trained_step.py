"""A step of three groups, and the learner's loss and gradient of it, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.trainer.algorithms.base import Finish, StepSums, TokenBatch, finisher
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.config import TrainerConfig

Array = np.ndarray


@dataclass
class Group:
    """One group: rewards, and for each sample log-probabilities of current and behaviour policy."""

    rewards: Array
    current: list[Array]
    behaviour: list[Array]
    reference: list[Array]


def step_of(seed: int, *, groups: int = 3, spread: float = 0.4) -> list[Group]:
    """A step with groups of 4; the last one has equal rewards, so no signal in a group."""
    rng = np.random.default_rng(seed)
    out = []
    for index in range(groups):
        lengths = rng.integers(1, 7, 4)
        current = [rng.normal(-1.5, 0.4, length) for length in lengths]
        out.append(
            Group(
                np.ones(4) if index == groups - 1 else rng.normal(size=4),
                current,
                [one + rng.normal(0, spread, len(one)) for one in current],
                [one + rng.normal(0, 0.5, len(one)) for one in current],
            )
        )
    return out


def trained(step: list[Group], *, cut: Any = (), **settings: Any) -> tuple[float, list[Array]]:
    """Value of the step's loss and its gradient by log-probability, as the learner has them.

    Each group is its own micro-batch, as in a stream. `cut` are samples of each group that
    `mask_truncated_completions` masks.
    """
    config = TrainerConfig.model_validate(settings)
    algorithm = make(config)
    total, grads, parts = 0.0, [], []
    sums: dict[str, float] = {}
    silent = tokens = samples = 0
    for group in step:
        lengths = np.array([len(one) for one in group.current])
        logprobs = torch.tensor(np.concatenate(group.current), requires_grad=True)
        advantages = algorithm.advantages(group.rewards)
        silent += not advantages.any()
        tokens, samples = tokens + int(lengths.sum()), samples + len(lengths)
        weights = 1 / lengths if config.loss_normalization == "sequence" else np.ones(len(lengths))
        weights = weights * [index not in cut for index in range(len(lengths))]
        batch = TokenBatch(
            logprobs,
            torch.tensor(np.concatenate(group.behaviour)),
            torch.tensor(np.repeat(advantages, lengths)),
            torch.tensor(np.repeat(weights, lengths)),
            torch.tensor(np.concatenate(group.reference)),
            torch.tensor(np.repeat(np.arange(len(lengths)), lengths)),
        )
        found = algorithm.loss(batch)
        for name, one in found.sums.items():
            sums[name] = sums.get(name, 0.0) + float(one.reshape(-1)[0])
        parts.append(
            {
                name: (float(one.detach()), torch.autograd.grad(one, logprobs, retain_graph=True))
                for name, one in found.parts.items()
            }
        )
        (own,) = torch.autograd.grad(found.loss, logprobs)
        total += float(found.loss.detach())
        grads.append(own.numpy())
    last = finisher(algorithm)
    factors = Finish() if last is None else last.finish(StepSums(len(step), silent, tokens, sums))
    divisor = tokens if config.loss_normalization == "token" else samples
    total *= factors.scale
    for index, per_group in enumerate(parts):
        grads[index] = grads[index] * factors.scale
        for name, (value, (grad,)) in per_group.items():
            total += factors.parts.get(name, 1.0) * value
            grads[index] = grads[index] + factors.parts.get(name, 1.0) * grad.numpy()
    return total / divisor, [one / divisor for one in grads]
