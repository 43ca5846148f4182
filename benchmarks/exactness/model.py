"""Policies small enough to enumerate, in NumPy: the probability of every sequence is known exactly.

A policy over V tokens and sequences of L tokens is one table per position, p(next | all before).
A context is its tokens read as a number in base V. A whole sequence read that way is its *cell*:
the bin in which a sample of it is counted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class TabularPolicy:
    """One distribution of the next token per context."""

    tables: tuple[Doubles, ...]
    """L tables; table t is `[V ** t, V]`."""

    @property
    def vocabulary(self) -> int:
        return self.tables[0].shape[1]

    @property
    def length(self) -> int:
        return len(self.tables)

    def at(self, position: Codes, code: Codes) -> Doubles:
        """`[n, V]` distributions of the next token after `position` tokens with number `code`."""
        starts = np.cumsum([0, *(len(table) for table in self.tables)])
        return np.concatenate(self.tables)[starts[position] + code]

    def sequence_distribution(self) -> Doubles:
        """`[V ** L]` probability of every sequence."""
        distribution = np.ones(1)
        for table in self.tables:
            distribution = (distribution[:, None] * table).ravel()
        return distribution

    def sample(self, rng: np.random.Generator, count: int) -> Codes:
        nothing = np.zeros((count, self.length), np.int64)
        return self.complete(rng, nothing, np.zeros(count, np.int64))

    def complete(self, rng: np.random.Generator, tokens: Codes, done: Codes) -> Codes:
        """`[n, L]` sequences: row i keeps the first done[i] of its tokens, the rest is drawn."""
        out = np.empty_like(tokens)
        code = np.zeros(len(tokens), np.int64)
        for at, table in enumerate(self.tables):
            out[:, at] = np.where(at < done, tokens[:, at], draw(rng, table[code]))
            code = code * self.vocabulary + out[:, at]
        return out

    def along(self, tokens: Codes) -> Doubles:
        """`[n, L, V]` the distributions at each position of `[n, L]` sequences."""
        codes = contexts(tokens, self.vocabulary)
        return np.stack([table[codes[:, at]] for at, table in enumerate(self.tables)], axis=1)


def random_policy(seed: int, vocabulary: int, length: int, peaked: float = 0.8) -> TabularPolicy:
    """Dirichlet tables; the smaller `peaked`, the further from uniform."""
    rng = np.random.default_rng(seed)
    alpha = np.full(vocabulary, peaked)
    return TabularPolicy(tuple(rng.dirichlet(alpha, vocabulary**at) for at in range(length)))


def mixture(
    one: TabularPolicy, other: TabularPolicy, share: float, top_p: float = 1.0
) -> TabularPolicy:
    """(1 - `share`) of the first policy's tables plus `share` of the second's, then top-p."""
    tables = [(1 - share) * a + share * b for a, b in zip(one.tables, other.tables, strict=True)]
    return TabularPolicy(tuple(nucleus(table, top_p) for table in tables))


def nucleus(table: Doubles, top_p: float) -> Doubles:
    """The smallest set of most probable tokens that reaches `top_p`, rescaled."""
    if top_p >= 1.0:
        return table
    order = np.argsort(-table, axis=1, kind="stable")
    ordered = np.take_along_axis(table, order, 1)
    kept = np.where(np.cumsum(ordered, 1) - ordered < top_p, ordered, 0.0)
    out = np.zeros_like(table)
    np.put_along_axis(out, order, kept / kept.sum(1, keepdims=True), 1)
    return out


def draw(rng: np.random.Generator, table: Doubles) -> Codes:
    """`[n]` one token of each of `[n, V]` distributions; never one of probability 0."""
    cumulative = np.cumsum(table, axis=1)
    number = rng.random(len(table)) * cumulative[:, -1]
    return (number[:, None] >= cumulative).sum(axis=1)


def contexts(tokens: Codes, vocabulary: int) -> Codes:
    """`[n, L + 1]` the context before each token of `[n, L]`, and last the cell."""
    out = np.zeros((len(tokens), tokens.shape[1] + 1), np.int64)
    for at in range(tokens.shape[1]):
        out[:, at + 1] = out[:, at] * vocabulary + tokens[:, at]
    return out


def cells(tokens: Codes, vocabulary: int) -> Codes:
    """`[n]` cell of each of `[n, L]` sequences."""
    return contexts(tokens, vocabulary)[:, -1]


def top_ids(distributions: Doubles, k: int) -> NDArray[np.int32]:
    """`[N, K]` the most probable tokens of `[N, V]` distributions, padded with -1."""
    ids = np.argsort(-distributions, axis=1, kind="stable")[:, :k]
    return np.where(np.take_along_axis(distributions, ids, 1) > 0, ids, -1).astype(np.int32)


def log_of_listed(distributions: Doubles, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """`[N, K]` log-probabilities at ids of `[N, V]` distributions, -inf where an id is -1."""
    with np.errstate(divide="ignore"):
        logs = np.log(np.take_along_axis(distributions, ids.clip(min=0), 1)).astype(np.float32)
    return np.where(ids >= 0, logs, np.float32(-np.inf))


def outside(distributions: Doubles, ids: NDArray[np.int32]) -> Doubles:
    """`[N, V]` the mass of each token that is not among its `[N, K]` ids."""
    row, place = np.nonzero(ids >= 0)
    out = distributions.copy()
    out[row, ids[row, place]] = 0.0
    return out


def name(distributions: Doubles, ids: NDArray[np.int32], noise: Doubles) -> Codes:
    """`[N]` the token outside its ids that exponential noise `[N, V]` makes."""
    with np.errstate(divide="ignore"):
        return np.asarray((noise / outside(distributions, ids)).argmin(axis=1))


def draw_in_two_stages(
    rng: np.random.Generator, distributions: Doubles, ids: NDArray[np.int32]
) -> tuple[Codes, Doubles]:
    """`[N]` draws from `[N, V]`, a symbol first and then its name, and the noise `[N, V]`."""
    listed = np.where(ids >= 0, np.take_along_axis(distributions, ids.clip(min=0), 1), 0.0)
    rest = np.maximum(outside(distributions, ids).sum(1, keepdims=True), 0.0)
    symbols = draw(rng, np.concatenate([listed, rest], axis=1))
    noise = rng.exponential(size=distributions.shape)
    k = ids.shape[1]
    own = np.take_along_axis(ids, symbols.clip(max=k - 1)[:, None], 1)[:, 0]
    return np.where(symbols < k, own, name(distributions, ids, noise)), noise
