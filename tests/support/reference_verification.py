"""The rules for kept tokens as docs/exactness.md states them: plain Python, whole distributions."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.exactness.model import Doubles
from benchmarks.exactness.pure import PolicyPair


def admitted(q: Doubles, p: Doubles, k_q: int, k_p: int) -> list[int]:
    """A = topK(q) & topK(p), restricted to tokens with mass under both."""
    best = [set(np.argsort(-d, kind="stable")[:k].tolist()) for d, k in ((q, k_q), (p, k_p))]
    return sorted(x for x in best[0] & best[1] if q[x] > 0 and p[x] > 0)


def residual(q: Doubles, p: Doubles, a: list[int], w: float) -> Doubles:
    """max(w p - q_A, 0), not rescaled."""
    q_a = np.zeros_like(q)
    q_a[a] = q[a]
    return np.maximum(w * p - q_a, 0.0)


Step = tuple[Doubles, Doubles, list[int]]


def hold_probabilities(
    tokens: list[int], steps: list[Step], block: bool
) -> tuple[list[float], list[float]]:
    """For one row: the probability h_i that each i = 1 .. n holds, and the weights w_0 .. w_n."""
    holds, weights = [], [1.0]
    for i, x in enumerate(tokens):
        q, p, a = steps[i]
        ratio = p[x] / q[x] if x in a else 0.0
        if not block:
            holds.append(min(1.0, ratio))
            weights.append(1.0)
            continue
        w = min(1.0, weights[-1] * ratio)
        weights.append(w)
        h = w
        if i + 1 < len(tokens) and w < 1.0:
            s = residual(*steps[i + 1], w).sum()
            h = s / (s + 1.0 - w)
        holds.append(h)
    return holds, weights


def accepted_distribution(holds: list[float], block: bool) -> list[float]:
    """P(k tokens are accepted) for k = 0 .. n."""
    n = len(holds)
    if block:  # the largest i that holds
        return [
            (holds[k - 1] if k else 1.0) * float(np.prod([1 - h for h in holds[k:]]))
            for k in range(n + 1)
        ]
    out = [float(np.prod(holds[:k])) * (1 - holds[k]) for k in range(n)]
    return [*out, float(np.prod(holds))]


def emitted_distribution(pair: PolicyPair, length: int, k_q: int, k_p: int, block: bool) -> Doubles:
    """Distribution of the emitted sequences when `length` tokens were kept, by enumeration.

    Sums over all kept texts, numbers of accepted tokens and tokens placed after them.
    """
    vocabulary, total = pair.new.vocabulary, pair.new.length
    emitted = np.zeros([vocabulary] * total)
    for text in itertools.product(range(vocabulary), repeat=length):
        steps, drawn = [], 1.0
        padded = np.array([[*text, *[0] * (total - length)]])
        olds, news = pair.old.along(padded)[0], pair.new.along(padded)[0]
        for q, p, x in zip(olds, news, text, strict=False):
            steps.append((q, p, admitted(q, p, k_q, k_p)))
            drawn *= q[x]
        holds, weights = hold_probabilities(list(text), steps, block)
        for k, chance in enumerate(accepted_distribution(holds, block)):
            if drawn * chance == 0.0:
                continue
            if k < length:
                left = residual(*steps[k], weights[k])
                following = left / left.sum()
            else:
                following = None
            emitted += drawn * chance * continued(pair, text[:k], following)
    return emitted.ravel()


def continued(pair: PolicyPair, start: tuple[int, ...], following: Doubles | None) -> Doubles:
    """Distribution of sequences: `start`, one token from `following`, then the new policy."""
    shape = [pair.new.vocabulary] * pair.new.length
    emitted = np.zeros(shape)
    for cell in np.ndindex(*shape):
        if cell[: len(start)] != start:
            continue
        tables = pair.new.along(np.array([cell]))[0]
        factors = [tables[i][cell[i]] for i in range(len(start), len(cell))]
        if following is not None:
            factors[0] = following[cell[len(start)]]
        emitted[cell] = np.prod(factors)
    return emitted
