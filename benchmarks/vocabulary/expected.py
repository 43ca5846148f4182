"""Whole distributions of two policies along a text, and how much of it is expected to be kept.

The texts follow the old policy whatever K was when they were drawn, so one set of texts serves
every K. Only the noise of a tail token depends on K, and it need not be drawn: with Gumbel noise g
that is shared by both policies, the argmax outside A of log q + g is the argmax of log p + g, given
that it is x, with probability (Daliri, Musco, Suresh 2024, arXiv 2408.07978, theorem 2)

    q_T / (q(x) S),    S = sum over y outside A of max(q(y) / q(x), p(y) / p(x)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import IntArray

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
    """Expected kept tokens divided by all tokens: K = V (`all`), or with a tail (`tail`)."""
    goes_on = np.where(ratios.in_tail, ratios.same, 1.0).cumprod(axis=1)
    symbol = np.where(ratios.in_tail, ratios.tail, ratios.token)
    return {
        "all": float(block_weights(ratios.token).mean()),
        "tail": float((goes_on * block_weights(symbol)).mean()),
    }


def block_weights(ratios: Doubles) -> Doubles:
    """`[B, L]` w_i = min(1, w_(i-1) r_i): the probability that the first i tokens are accepted."""
    weights = np.empty_like(ratios)
    weight = np.ones(len(ratios))
    for place in range(ratios.shape[1]):
        weight = np.minimum(1.0, weight * ratios[:, place])
        weights[:, place] = weight
    return weights


@dataclass(frozen=True)
class Expected:
    """Means over the tokens of some texts."""

    drift: float
    """Total variation of the two policies at a token."""
    entropy: float
    """Of the old policy's distributions, in nats."""
    outside: dict[int, float]
    """K to the old policy's mass outside its K most probable tokens."""
    kept: dict[int, dict[int, dict[str, float]]]
    """Length and K to the expected kept share by rule (`kept_shares`). A shorter
    length takes the first tokens of the texts."""


@torch.no_grad()
def expected(
    old: torch.nn.Module,
    new: torch.nn.Module,
    texts: Sequence[tuple[IntArray, IntArray]],
    ks: Sequence[int],
    lengths: Sequence[int],
    temperature: float = 1.0,
) -> Expected:
    """Judge texts that were drawn from the old policy."""
    drift, entropy, columns = 0.0, 0.0, []
    for prompt, response in texts:
        q, p = (_distributions(model, prompt, response, temperature) for model in (old, new))
        drift += float((p - q).abs().sum(-1).mean() / 2)
        entropy += float(torch.special.entr(q).sum(-1).mean())
        columns.append(list(_judge(q, p, torch.tensor(response, dtype=torch.long), ks)))
    outside = {k: float(np.mean([text[i].outside for text in columns])) for i, k in enumerate(ks)}
    judged = {
        k: TextRatios(
            *(
                np.stack([getattr(text[i], name) for text in columns])
                for name in ("token", "tail", "in_tail", "same")
            )
        )
        for i, k in enumerate(ks)
    }
    kept = {
        length: {k: kept_shares(ratios.first(length)) for k, ratios in judged.items()}
        for length in lengths
    }
    return Expected(drift / len(texts), entropy / len(texts), outside, kept)


@dataclass(frozen=True)
class _Judged:
    """One text and one K; the fields of `TextRatios`, `[L]`, and the mass outside A."""

    token: Doubles
    tail: Doubles
    in_tail: np.ndarray
    same: Doubles
    outside: float


def _judge(q: Tensor, p: Tensor, tokens: Tensor, ks: Sequence[int]) -> Iterator[_Judged]:
    """`[L, V]` distributions and `[L]` tokens, for each K. Sums are in float64."""
    here = tokens[:, None]
    q_x, p_x = q.gather(1, here), p.gather(1, here)
    larger = torch.maximum(q / q_x, p / p_x)
    order = q.topk(max(ks), dim=1).indices
    in_a = [values.gather(1, order).double().cumsum(1) for values in (q, p, larger)]
    every = larger.sum(1, dtype=torch.float64)
    rank = torch.where(order == here, torch.arange(max(ks)), max(ks)).amin(1)
    ratio = (p_x / q_x)[:, 0]
    for k in ks:
        q_in, p_in, larger_in = (values[:, k - 1] for values in in_a)
        q_tail, p_tail = 1.0 - q_in, 1.0 - p_in
        same = q_tail / (q_x[:, 0] * (every - larger_in))
        in_tail = rank >= k
        yield _Judged(
            token=ratio.double().numpy(),
            tail=(p_tail / q_tail).numpy(),
            in_tail=in_tail.numpy(),
            same=same.clamp(0.0, 1.0).numpy(),
            outside=float(q_tail.mean()),
        )


def _distributions(
    model: torch.nn.Module, prompt: IntArray, response: IntArray, temperature: float
) -> Tensor:
    """`[L, V]` next-token distributions before each token of the response."""
    tokens = torch.from_numpy(np.concatenate([prompt, response[:-1]])).long()
    logits: Tensor = model(tokens[None], logits_to_keep=len(response)).logits[0]
    return (logits.float() / temperature).softmax(-1)
