"""Sums of gradients of a loss's further parts, where parameters are in parts on the ranks.

Gradients of the parameters come from a backward pass only: it is what sums and divides them. So a
part has a backward pass of its own, and its gradients are put aside.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from asyncrl.trainer.objective.gradient_parts import GradientParts, add_up


class ShardedParts(GradientParts):
    """As `GradientParts`; the sums are of this rank's rows."""

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add the gradient of each part; the graph is kept for the loss's own backward pass."""
        if not parts:
            return
        aside = [one.grad for one in self._parameters]
        for name, loss in parts.items():
            for one in self._parameters:
                one.grad = None
            loss.backward(retain_graph=True)
            new = [one.grad for one in self._parameters]
            old = self._sums.get(name)
            self._sums[name] = (
                new if old is None else [add_up(a, b) for a, b in zip(old, new, strict=True)]
            )
        for one, grad in zip(self._parameters, aside, strict=True):
            one.grad = grad
