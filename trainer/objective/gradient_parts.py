"""Sums of gradients of a loss's further parts, which get their factors at the end of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.trainer.algorithms.base import Finish


class GradientParts:
    """One gradient per part and parameter, in addition to `.grad`, which holds the loss's own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [one for one in parameters if one.requires_grad]
        self._sums: dict[str, list[Tensor | None]] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add the gradient of each part; the graph is kept for the loss's own backward pass."""
        for name, loss in parts.items():
            new = torch.autograd.grad(loss, self._parameters, retain_graph=True, allow_unused=True)
            old = self._sums.get(name)
            self._sums[name] = (
                list(new) if old is None else [add_up(a, b) for a, b in zip(old, new, strict=True)]
            )

    @torch.no_grad()
    def finish(self, factors: Finish) -> None:
        """Scale `.grad`, and add each part times its factor, which is 1 if `factors` lacks it."""
        if factors.scale != 1:
            for one in self._parameters:
                if one.grad is not None:
                    one.grad.mul_(factors.scale)
        for name, grads in self._sums.items():
            factor = factors.parts.get(name, 1.0)
            for one, grad in zip(self._parameters, grads, strict=True):
                if grad is not None:
                    one.grad = add_up(one.grad, grad.mul_(factor))
        self._sums.clear()


def add_up(mine: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients, in the first one's memory; None: 0."""
    if mine is None or other is None:
        return other if mine is None else mine
    return mine.add_(other)
