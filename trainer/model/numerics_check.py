"""Whether two ways to compute a model's hidden states are the same, value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def results_of(run: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """What `run` computes, and gradients of a function of it by some parameters."""
    with torch.enable_grad():
        out = run()
        direction = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        trained = [one for one in parameters if one.requires_grad]
        grads = torch.autograd.grad((out * direction).sum(), trained) if trained else ()
    return [out.detach(), *grads]


def where_different(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-3
) -> str | None:
    """By how much the first of `results_of` differs that does by more than rounding, or None."""
    size = max((float(one.norm()) for one in theirs[1:]), default=0.0)
    for one, other in zip(ours, theirs, strict=True):
        gap, whole = float((one - other).norm()), float(other.norm())
        if not gap <= tolerance * (whole + 0.01 * size):
            return f"by {gap:.2g} of {whole:.2g}"
    return None
