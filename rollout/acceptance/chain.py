"""Acceptance of a drafted chain of tokens by fresh draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from asyncrl.rollout.trajectory import IntArray

if TYPE_CHECKING:
    import torch

ArrayT = TypeVar("ArrayT", IntArray, "torch.Tensor")


def accept_chain(samples: ArrayT, drafts: ArrayT, lengths: ArrayT) -> ArrayT:
    """Count the drafted tokens of each row that are accepted, given fresh draws at every position.

    The engine scores a row's context followed by its draft d_1 .. d_n in one forward pass, and
    draws y_t ~ p(. | context, d_1 .. d_{t-1}) with fresh randomness for t = 1 .. n+1. Row b emits
    the draws that equal its draft, and the next one: the response grows by samples[b, : accepted[b]
    + 1].

    This is exact for any draft that is fixed before the y_t are drawn, even one made of trained-on
    tokens: y_t is emitted only if d_s = y_s for all s < t, so each emitted token was drawn from p
    given exactly the tokens emitted before it. It equals rejection sampling from a proposal q with
    all its mass on d (Leviathan et al. 2023, arXiv 2211.17192, section 2.3: min(1, p/q) = p(d), and
    the residual (p - q)+ is p without d).

    Args:
        samples: `[B, T+1]` fresh draws; those after position lengths[b] + 1 are ignored.
        drafts: `[B, T]` drafted tokens; those after lengths[b] are ignored.
        lengths: `[B]` drafted tokens of each row, 0 to T.

    Returns:
        `[B]` drafted tokens accepted, 0 to lengths[b]. All arguments are NumPy arrays or all are
        torch tensors (on any device); so is the result.

    Raises:
        ValueError: the shapes do not fit together.
    """
    rows, width = drafts.shape
    if tuple(samples.shape) != (rows, width + 1) or tuple(lengths.shape) != (rows,):
        raise ValueError(
            f"accept_chain: drafts {tuple(drafts.shape)} need samples "
            f"{(rows, width + 1)} and lengths {(rows,)}, not {tuple(samples.shape)} "
            f"and {tuple(lengths.shape)}"
        )
    agree = samples[:, :-1] == drafts
    leading: ArrayT = agree.cumprod(1).sum(1)  # draws before the first that differs
    accepted: ArrayT = leading.clip(max=lengths)
    return accepted
