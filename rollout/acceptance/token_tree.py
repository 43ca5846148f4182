"""Acceptance of drafted chains and trees of tokens by fresh draws."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from asyncrl.rollout.jit import check_offsets, int32_values, kernels_of
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


kernel = kernels_of("rollout/acceptance")


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """The tokens that B rows emit: P accepted nodes in all, and one more token per row."""

    accepted: IntArray
    """`[B]` drafted tokens accepted, 0 to the depth of the row's tree."""
    nodes: IntArray
    """`[P]` accepted nodes as indices into `tokens`, row after row, each path from the root."""
    offsets: IntArray
    """`[B+1]` row i's path is nodes[offsets[i] : offsets[i+1]]."""
    emitted: IntArray
    """`[P+B]` tokens to append: the path, then the draw that left the tree. Row i's are
    emitted[offsets[i] + i : offsets[i+1] + i + 1]."""
    draws: IntArray
    """`[P+B]` index in `samples` of each emitted token."""


def accept_tree(
    samples: ArrayLike, tokens: ArrayLike, parents: ArrayLike, offsets: ArrayLike
) -> AcceptedPaths:
    """Follow each row's tree along fresh draws, and emit them until one is not a child.

    The engine scores a row's last token (the root) and all its drafted nodes in one pass, where
    each node attends to its own path only, and draws one token y ~ p(. | path) after each of them
    with fresh randomness. A row emits the root's draw y; if a child of the root holds y, it emits
    that child's draw next, and so on until a draw is not a child.

    This is exact for the reason given in `accept_chain`: every emitted token was drawn from p given
    exactly what was emitted before it, in a tree fixed before the draws. It equals the rule that
    tries the children c_1, c_2 .. one after the other as deterministic proposals, without
    replacement: accept c_1 with p(c_1), otherwise c_2 with p(c_2) / (1 - p(c_1)), .., otherwise
    draw from p without all of them. No other rule with deterministic proposals accepts more often.

    Args:
        samples: `[N+B]` draws, row after row: the root's, then those of its nodes in their order.
            Row i's begin at offsets[i] + i.
        tokens: `[N]` drafted tokens, as in `asyncrl.cache.tree.rollout_tree.Drafts`.
        parents: `[N]` index of the parent node within its row; -1: the row's last token. A parent
            precedes its children; a node that violates this is never accepted.
        offsets: `[B+1]` row i's nodes are offsets[i] .. offsets[i+1] - 1.

    Raises:
        TypeError: an argument does not hold integers.
        ValueError: the shapes do not fit together.
    """
    drawn, drafted = int32_values("samples", samples), int32_values("tokens", tokens)
    before, starts = int32_values("parents", parents), int32_values("offsets", offsets)
    check_offsets("accept_tree", starts, len(drafted))
    rows = len(starts) - 1
    if len(before) != len(drafted) or len(drawn) != len(drafted) + rows:
        raise ValueError(
            f"accept_tree: {len(drafted)} tokens in {rows} rows need as many parents and "
            f"{len(drafted) + rows} samples, not {len(before)} and {len(drawn)}"
        )
    draws = np.empty(len(drawn), np.int32)
    ends = np.zeros(rows + 1, np.int32)
    total = _walk(drawn, drafted, before, starts, draws, ends)
    draws = draws[: total + rows]
    # Draw k of a row was made after its node k - 1.
    row = np.repeat(np.arange(rows, dtype=np.int32), np.diff(ends) + 1)
    at_root = draws == starts[:-1][row] + row
    return AcceptedPaths(
        accepted=np.diff(ends),
        nodes=(draws - row - 1)[~at_root],
        offsets=ends,
        emitted=drawn[draws],
        draws=draws,
    )


@kernel
def _walk(
    samples: IntArray,
    tokens: IntArray,
    parents: IntArray,
    offsets: IntArray,
    draws: IntArray,
    ends: IntArray,
) -> int:
    """Fill `draws` and `ends`; return the number of accepted nodes.

    One pass over the nodes is enough, because a parent precedes its children.
    """
    emitted = 0
    for row in range(len(offsets) - 1):
        first = offsets[row]
        root = first + row
        at = -1
        draws[emitted] = root
        emitted += 1
        for node in range(offsets[row + 1] - first):
            if parents[first + node] == at and tokens[first + node] == samples[root + at + 1]:
                at = node
                draws[emitted] = root + node + 1
                emitted += 1
        ends[row + 1] = emitted - row - 1
    return int(emitted - len(offsets) + 1)
