"""Markov chains with a chosen drift: the rule with the tail as a symbol, in plain NumPy.

It shares no code with the engines, so it also checks them (tests/benchmarks/test_vocabulary.py).
The logits of a chain's transitions are normal with one scale for the old policy, and the new policy
adds Gumbel noise. The two scales are solved for: a chain has a given mass outside the top K and a
given total variation per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.vocabulary.rules import Doubles, TextRatios


@dataclass(frozen=True)
class Chain:
    vocabulary: int
    length: int
    k: int
    drift: float
    """Total variation of the two policies at a token, as the texts of the old one meet it."""
    outside: float
    """Mass of the old policy outside its top K."""


CHAINS = (
    Chain(512, 256, 64, 0.0070, 0.049),
    Chain(512, 256, 8, 0.0071, 0.32),
    Chain(64, 256, 8, 0.0070, 0.19),
    Chain(512, 1024, 32, 0.0035, 0.11),
)


def policies(chain: Chain, seed: int = 0) -> tuple[Doubles, Doubles]:
    """Transition matrices `[V, V]` of the old and the new policy."""
    rng = np.random.default_rng(seed)
    shape = (chain.vocabulary, chain.vocabulary)
    normal, gumbel = rng.normal(size=shape), rng.gumbel(size=shape)

    def outside(scale: float) -> float:
        largest = np.sort(_softmax(scale * normal), axis=1)[:, -chain.k :]
        return 1.0 - float(largest.sum(axis=1).mean())

    old_logits = normal * _solve(outside, chain.outside, 8.0)
    old = _softmax(old_logits)

    def drift(scale: float) -> float:
        return float(np.abs(_softmax(old_logits + scale * gumbel) - old).sum(axis=1).mean()) / 2

    return old, _softmax(old_logits + gumbel * _solve(drift, chain.drift, 1.0))


def simulate(old: Doubles, new: Doubles, texts: int, length: int, k: int) -> TextRatios:
    """Draw texts from the old policy in two stages, and judge their tail tokens under the new.

    The symbol comes from a uniform: one of the K most probable tokens, or the tail. A tail token is
    the argmax of log q + g outside the top K, and its twin that of log p + g with the same Gumbel
    noise g, which is fresh at every place.
    """
    rng = np.random.default_rng(1)
    vocabulary = old.shape[1]
    order = np.argsort(-old, axis=1, kind="stable")[:, :k]
    listed = np.zeros(old.shape, np.bool_)
    np.put_along_axis(listed, order, values=True, axis=1)
    tail = [1.0 - np.where(listed, policy, 0.0).sum(axis=1) for policy in (old, new)]
    log_old, log_new = (np.where(listed, -np.inf, np.log(policy)) for policy in (old, new))
    cumulative = np.take_along_axis(old, order, axis=1).cumsum(axis=1)
    at = rng.integers(vocabulary, size=texts)
    ratios = TextRatios(
        token=np.empty((texts, length)),
        tail=np.empty((texts, length)),
        in_tail=np.empty((texts, length), np.bool_),
        same=np.empty((texts, length)),
    )
    for place in range(length):
        symbol = (cumulative[at] <= rng.random(texts)[:, None]).sum(axis=1)
        noise = rng.gumbel(size=(texts, vocabulary))
        name = (log_old[at] + noise).argmax(axis=1)
        in_tail = symbol == k
        drawn = np.where(in_tail, name, order[at, np.minimum(symbol, k - 1)])
        ratios.token[:, place] = new[at, drawn] / old[at, drawn]
        ratios.tail[:, place] = tail[1][at] / np.maximum(tail[0][at], 1e-300)
        ratios.in_tail[:, place] = in_tail
        ratios.same[:, place] = (log_new[at] + noise).argmax(axis=1) == name
        at = drawn
    return ratios


def _softmax(logits: Doubles) -> Doubles:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)


def _solve(function: Callable[[float], float], wanted: float, high: float) -> float:
    """The x in (0, high) with function(x) = wanted, for a monotone function; by bisection."""
    low, rises = 0.0, function(high) > function(high / 2)
    for _ in range(16):
        middle = (low + high) / 2
        if (function(middle) < wanted) == rises:
            low = middle
        else:
            high = middle
    return (low + high) / 2
