"""The rules for kept tokens as docs/exactness.md states them: plain Python, whole distributions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.exactness.model import Doubles
from benchmarks.exactness.pure import PolicyPair


@dataclass(frozen=True)
class Step:
    """One position of a kept row: both policies, and the list that was fixed before the draw."""

    q: Doubles
    p: Doubles
    listed: list[int]

    def symbol(self, token: int) -> int:
        """Place in the list; its length for the tail."""
        return self.listed.index(token) if token in self.listed else len(self.listed)

    def symbols(self, distribution: Doubles) -> Doubles:
        """`[K + 1]` of a distribution over tokens."""
        own = distribution[self.listed]
        return np.append(own, max(distribution.sum() - own.sum(), 0.0))

    def tail(self, distribution: Doubles) -> Doubles:
        """`[V]` a distribution outside the list, rescaled; zeros where it has no mass there."""
        rest = distribution.copy()
        rest[self.listed] = 0.0
        total = rest.sum()
        return rest / total if total > 0 else rest

    def residual(self, w: float) -> Doubles:
        """`[K + 1]` max(w p - q, 0) of symbols, not rescaled."""
        return np.maximum(w * self.symbols(self.p) - self.symbols(self.q), 0.0)

    def tokens_of(self, symbols: Doubles) -> Doubles:
        """`[V]` tokens: a symbol of this distribution, a tail symbol named by p."""
        out = symbols[-1] * self.tail(self.p)
        out[self.listed] += symbols[:-1]
        return out


def best(distribution: Doubles, k: int) -> list[int]:
    """The k most probable tokens that have mass."""
    return [int(x) for x in np.argsort(-distribution, kind="stable")[:k] if distribution[x] > 0]


def hold_probabilities(
    symbols: list[int], steps: list[Step], block: bool
) -> tuple[list[float], list[float]]:
    """For one row: the probability h_i that each i = 1 .. n holds, and the weights w_0 .. w_n."""
    holds, weights = [], [1.0]
    for i, x in enumerate(symbols):
        q, p = steps[i].symbols(steps[i].q)[x], steps[i].symbols(steps[i].p)[x]
        ratio = p / q if q > 0 else 0.0
        if not block:
            holds.append(min(1.0, ratio))
            weights.append(1.0)
            continue
        w = min(1.0, weights[-1] * ratio)
        weights.append(w)
        h = w
        if i + 1 < len(symbols) and w < 1.0:
            s = steps[i + 1].residual(w).sum()
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


def coupling(step: Step, alike: float) -> Doubles:
    """`[V, V]` joint distribution of the old and the new name of a tail token.

    The proof needs its marginals only. Between independent (0) and as often the same as can be (1).
    """
    old, new = step.tail(step.q), step.tail(step.p)
    if not new.any():  # p has nothing outside: the symbol is rejected, whatever its name
        new = old
    same = np.minimum(old, new)
    left = 1.0 - same.sum()
    most = np.diag(same)
    if left > 1e-15:
        most = most + np.outer(old - same, new - same) / left
    return np.asarray(alike * most + (1 - alike) * np.outer(old, new))


def rows_of(
    text: tuple[int, ...], steps: list[Step], alike: float
) -> Iterator[tuple[float, list[int]]]:
    """The rows that are judged for a kept text, with their probabilities given the text.

    A row ends with the first tail token that has another name under the new policy.
    """
    chance = 1.0
    for at, x in enumerate(text):
        step = steps[at]
        if step.symbol(x) < len(step.listed):
            continue
        joint = coupling(step, alike)[x]
        joint = joint / joint.sum()
        for other in np.flatnonzero(joint):
            if other != x:
                yield chance * joint[other], [*text[:at], int(other)]
        chance *= joint[x]
    if chance > 0:
        yield chance, list(text)


def emitted_distribution(
    pair: PolicyPair, length: int, k: int, block: bool, alike: float
) -> Doubles:
    """Distribution of the emitted sequences when `length` tokens were kept, by enumeration.

    Sums over all kept texts, new names, numbers of accepted tokens and tokens placed after them.
    """
    vocabulary, total = pair.new.vocabulary, pair.new.length
    emitted = np.zeros([vocabulary] * total)
    for text in itertools.product(range(vocabulary), repeat=length):
        padded = np.array([[*text, *[0] * (total - length)]])
        olds, news = pair.old.along(padded)[0], pair.new.along(padded)[0]
        steps = [Step(q, p, best(q, k)) for q, p in zip(olds, news, strict=True)][:length]
        drawn = float(np.prod([step.q[x] for step, x in zip(steps, text, strict=True)]))
        if drawn == 0.0:
            continue
        for named, row in rows_of(text, steps, alike):
            symbols = [step.symbol(x) for step, x in zip(steps, row, strict=False)]
            holds, weights = hold_probabilities(symbols, steps, block)
            for n, chance in enumerate(accepted_distribution(holds, block)):
                if chance < 1e-15:  # rounding, of nothing
                    continue
                following = None
                if n < len(row):
                    left = steps[n].tokens_of(steps[n].residual(weights[n]))
                    following = left / left.sum()
                start = tuple(row[:n])
                emitted += drawn * named * chance * continued(pair, start, following)
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
