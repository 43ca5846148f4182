"""Two things about kept tokens: training on them, and how many each rule accepts.

The trap: a policy trained on the very samples that it then verifies. In each replication a softmax
policy draws two sequences, takes one REINFORCE step on them, and a sample of the new policy is
asked for. The pairs (batch, sample) are compared with P(batch) * p_batch(sample), enumerated.

    trap-minpq      the first sequence of the batch, accepted with min(1, p/q): repeats the past
    trap-drafts     the same sequence as a draft, judged by fresh draws (the default): exact
    trap-untrained  a third sequence, drawn but not trained on, accepted with min(1, p/q): exact

The shares: the policy is a Markov chain of 64 tokens with about the entropy of a trained model,
changed by noise on its logits. docs/exactness.md discusses the numbers.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.acceptance import accept_chain, accept_lenient, symbols_of, verify_kept
from benchmarks.exactness.model import (
    Codes,
    Doubles,
    TabularPolicy,
    cells,
    draw,
    draw_in_two_stages,
    log_of_listed,
    name,
    top_ids,
)

TRAP_VOCABULARY, LENGTH, STEP = 3, 2, 1.5
SEQUENCES = TRAP_VOCABULARY**LENGTH
_TEXTS = np.stack(np.divmod(np.arange(SEQUENCES), TRAP_VOCABULARY), axis=1)


@dataclass(frozen=True)
class TrainedPolicies:
    """The policy before training, and the one that each ordered pair of sequences leads to."""

    before: TabularPolicy
    root: Doubles
    """`[B, V]` p(first token) of the policy trained on batch b, B = 9 * 9."""
    then: Doubles
    """`[B, V, V]` p(second | first)."""

    def pair_distribution(self) -> Doubles:
        """`[B * 9]` probability of each (batch, fresh sample of the policy trained on it)."""
        first = self.before.sequence_distribution()
        batches = (first[:, None] * first).ravel()
        after = (self.root[:, :, None] * self.then).reshape(len(batches), SEQUENCES)
        return (batches[:, None] * after).ravel()

    def along(self, batch: Codes, text: Codes) -> Doubles:
        """`[n, 2, V]` the distributions of the policy of batch[i] at both positions of text[i]."""
        return np.stack([self.root[batch], self.then[batch, text[:, 0]]], axis=1)


@cache
def trained() -> TrainedPolicies:
    """One REINFORCE step of size STEP for every batch, from random logits and rewards."""
    rng = np.random.default_rng(5)
    logits = [
        rng.normal(size=(1, TRAP_VOCABULARY)),
        rng.normal(size=(TRAP_VOCABULARY, TRAP_VOCABULARY)),
    ]
    rewards = rng.normal(size=SEQUENCES)
    tables = [np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in logits]
    roots, thens = [], []
    for batch in np.ndindex(SEQUENCES, SEQUENCES):
        changed = [a.copy() for a in logits]
        for one in batch:
            first, second = _TEXTS[one]
            # d log p(x) / d logits = onehot(x) - p; the advantage is the reward itself.
            for table, where, token in ((0, 0, first), (1, first, second)):
                onehot = np.arange(TRAP_VOCABULARY) == token
                slope = onehot - tables[table][where]
                changed[table][where] += STEP * rewards[one] * slope / len(batch)
        roots.append(np.exp(changed[0][0]) / np.exp(changed[0][0]).sum())
        thens.append(np.exp(changed[1]) / np.exp(changed[1]).sum(1, keepdims=True))
    return TrainedPolicies(TabularPolicy(tuple(tables)), np.stack(roots), np.stack(thens))


Trap = Callable[[np.random.Generator, int], tuple[Codes, dict[str, float]]]


def min_pq(rng: np.random.Generator, count: int) -> tuple[Codes, dict[str, float]]:
    """Apply the rule for untrained tokens to the first sequence of the batch."""
    first, second = trained().before.sample(rng, count), trained().before.sample(rng, count)
    batch = _batch(first, second)
    return _outcome(batch, _verified(rng, batch, first), first)


def untrained(rng: np.random.Generator, count: int) -> tuple[Codes, dict[str, float]]:
    """Apply it to a third sequence of the same policy, which was not trained on."""
    first, second, third = (trained().before.sample(rng, count) for _ in range(3))
    batch = _batch(first, second)
    return _outcome(batch, _verified(rng, batch, third), third)


def drafts(rng: np.random.Generator, count: int) -> tuple[Codes, dict[str, float]]:
    """The first sequence of the batch as a draft, judged by fresh draws."""
    first, second = trained().before.sample(rng, count), trained().before.sample(rng, count)
    batch = _batch(first, second)
    samples = np.zeros((count, LENGTH + 1), np.int32)
    for at in range(LENGTH):
        samples[:, at] = draw(rng, trained().along(batch, first)[:, at])
    lengths = np.full(count, LENGTH, np.int32)
    kept = accept_chain(samples, first.astype(np.int32), lengths)
    text = np.where(np.arange(LENGTH) <= kept[:, None], samples[:, :LENGTH], 0)
    return _outcome(batch, _complete(rng, batch, text, kept + 1), first)


def _batch(first: Codes, second: Codes) -> Codes:
    return cells(first, TRAP_VOCABULARY) * SEQUENCES + cells(second, TRAP_VOCABULARY)


def _verified(rng: np.random.Generator, batch: Codes, text: Codes) -> Codes:
    """min(1, p/q) and its residual; nothing is left out, because the lists hold all tokens."""
    count, tokens = len(text), text.ravel()
    before = trained().before.along(text).reshape(-1, TRAP_VOCABULARY)
    after = trained().along(batch, text).reshape(-1, TRAP_VOCABULARY)
    every = np.tile(np.arange(TRAP_VOCABULARY, dtype=np.int32), (len(tokens), 1))
    verdicts = verify_kept(
        tokens,
        log_of_listed(before, every),
        log_of_listed(after, every),
        offsets=np.arange(count + 1) * LENGTH,
        uniforms=rng.random((len(tokens), 2)),
        block=False,
    )
    out, placed = text.copy(), np.flatnonzero(verdicts.symbol >= 0)
    out[placed, verdicts.accepted[placed]] = verdicts.symbol[placed]
    return _complete(rng, batch, out, verdicts.accepted + (verdicts.symbol >= 0))


def _complete(rng: np.random.Generator, batch: Codes, text: Codes, done: Codes) -> Codes:
    text = text.copy()
    for at in range(LENGTH):
        text[:, at] = np.where(
            at < done, text[:, at], draw(rng, trained().along(batch, text)[:, at])
        )
    return text


def _outcome(batch: Codes, out: Codes, past: Codes) -> tuple[Codes, dict[str, float]]:
    """Cells of (batch, out), how often the past was repeated, and how often it should have been."""
    at = cells(past, TRAP_VOCABULARY)
    fresh = trained().pair_distribution().reshape(-1, SEQUENCES)
    fresh = fresh / fresh.sum(1, keepdims=True)
    cell = cells(out, TRAP_VOCABULARY)
    notes = {"repeated": float((cell == at).sum()), "repeated_fresh": float(fresh[batch, at].sum())}
    return batch * SEQUENCES + cell, notes


TRAPS: dict[str, tuple[Trap, bool]] = {
    "trap-minpq": (min_pq, False),
    "trap-drafts": (drafts, True),
    "trap-untrained": (untrained, True),
}
"""Sampler of each mode, and whether it is exact."""


VOCABULARY = 64


@dataclass(frozen=True)
class Shares:
    """The share of all kept tokens that each rule accepts."""

    length: int
    top_k: int
    tv_per_token: float
    """Mean total variation of the two policies at a position."""
    outside: float
    """Share of tokens that lie outside their list, topK(q)."""
    token: float
    """Accepted token by token."""
    block: float
    """Accepted by block."""
    specrl_1: float
    """SPEC-RL with lenience 1: min(1, p/q) of the drawn token, without lists. Biased."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(noise: float, length: int, top_k: int, rows: int, seed: int = 0) -> Shares:
    """Draw `rows` sequences from a chain and verify them under one changed by `noise`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(VOCABULARY, VOCABULARY)) * 4.0
    old, new = _softmax(logits), _softmax(logits + noise * rng.normal(size=logits.shape))
    tokens, before, lists, exponentials = _chain(rng, old, rows, length, top_k)
    q, p = old[before], new[before]
    offsets = np.arange(rows + 1) * length
    symbols = symbols_of(tokens.astype(np.int32), lists)
    outside = symbols == top_k
    names = tokens.copy()
    names[outside] = name(p[outside], lists[outside], exponentials[outside])
    uniforms = rng.random((len(tokens), 2))
    kept = {}
    for block in (False, True):
        verdicts = verify_kept(
            symbols, log_of_listed(q, lists), log_of_listed(p, lists), offsets=offsets,
            uniforms=uniforms, renamed=names != tokens, block=block,
        )  # fmt: skip
        kept[block] = float(verdicts.accepted.sum() / len(tokens))
    at = (np.arange(len(tokens)), tokens)
    lenient = accept_lenient(np.log(q[at]), np.log(p[at]), offsets, uniforms[:, 0], 1.0)
    return Shares(
        length=length,
        top_k=top_k,
        tv_per_token=float(0.5 * np.abs(q - p).sum(1).mean()),
        outside=float(outside.mean()),
        token=kept[False],
        block=kept[True],
        specrl_1=float(lenient.sum() / len(tokens)),
    )


def table(tokens: int) -> list[Shares]:
    """The shares of so many tokens, or of eight rows if those have more."""
    lengths = (64, 256, 1024) if tokens > 1024 else (64,)
    grid = [(noise, length, 8) for noise in (0.01, 0.03, 0.1) for length in lengths]
    grid += [(0.03, lengths[len(lengths) // 2], top_k) for top_k in (4, 16, 64)]
    return [measure(noise, length, k, max(8, tokens // length)) for noise, length, k in grid]


def _chain(
    rng: np.random.Generator, table: Doubles, rows: int, length: int, top_k: int
) -> tuple[Codes, Codes, NDArray[np.int32], Doubles]:
    """Tokens drawn in two stages and what stood before each, both `[rows x length]`.

    With their lists `[rows x length, K]` and noise `[rows x length, V]`.
    """
    lists = top_ids(table, top_k)
    text = np.empty((rows, length + 1), np.int64)
    noise = np.empty((rows, length, len(table)))
    text[:, 0] = 0
    for at in range(length):
        state = text[:, at]
        text[:, at + 1], noise[:, at] = draw_in_two_stages(rng, table[state], lists[state])
    before = text[:, :-1].ravel()
    return text[:, 1:].ravel(), before, lists[before], noise.reshape(-1, len(table))


def _softmax(logits: Doubles) -> Doubles:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))
