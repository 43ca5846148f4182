"""The share of a text that each rule keeps, in expectation.

Block verification accepts the first i tokens of a text with probability w_i, given these tokens and
the noise of the tail (docs/exactness.md). So the number of kept tokens is a sum of weights on
average over texts, and no acceptance needs to be drawn:

    all        K is the whole vocabulary: w_i = min(1, w_(i-1) p(x_i) / q(x_i))
    tail       the tokens outside the top K are one symbol T: the ratio there is p_T / q_T, and the
               text ends before the first tail token that is renamed under p
    lost_tail  the rule before decision 0026: the ratio is 0 outside the top K

`tail` counts old tokens only. The new name of a tail token, and the token that is drawn
after a rejection, need not be generated either; they are one more token a text at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class TextRatios:
    """What the rules read of B texts of L tokens each."""

    token: Doubles
    """`[B, L]` p(x) / q(x) of each token."""
    tail: Doubles
    """`[B, L]` p_T / q_T; read where `in_tail`."""
    in_tail: Flags
    """`[B, L]` whether the token lies outside the top K of q."""
    same: Doubles
    """`[B, L]` probability that the tail token has the same name under p, given the text (0 or
    1 where the noise is known); read where `in_tail`."""

    def first(self, length: int) -> TextRatios:
        return TextRatios(
            self.token[:, :length],
            self.tail[:, :length],
            self.in_tail[:, :length],
            self.same[:, :length],
        )


def kept_shares(ratios: TextRatios) -> dict[str, float]:
    """Expected kept tokens divided by all tokens, by rule: `all`, `tail`, `lost_tail`."""
    goes_on = np.where(ratios.in_tail, ratios.same, 1.0).cumprod(axis=1)
    symbol = np.where(ratios.in_tail, ratios.tail, ratios.token)
    return {
        "all": float(block_weights(ratios.token).mean()),
        "tail": float((goes_on * block_weights(symbol)).mean()),
        "lost_tail": float(block_weights(np.where(ratios.in_tail, 0.0, ratios.token)).mean()),
    }


def block_weights(ratios: Doubles) -> Doubles:
    """`[B, L]` w_i = min(1, w_(i-1) r_i): the probability that the first i tokens are accepted."""
    weights = np.empty_like(ratios)
    weight = np.ones(len(ratios))
    for place in range(ratios.shape[1]):
        weight = np.minimum(1.0, weight * ratios[:, place])
        weights[:, place] = weight
    return weights
