"""Clipping and AdamW (1711.05101, algorithm 2), tensor by tensor, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
