"""How many kept tokens each rule accepts after a small change of the policy.

The policy is a Markov chain of 64 tokens with about the entropy of a trained model (some 0.5 nats a
token), changed by noise on its logits. docs/exactness.md discusses the numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.acceptance import accept_lenient, symbols_of, verify_kept
from benchmarks.exactness.model import (
    Codes,
    Doubles,
    draw_in_two_stages,
    log_of_listed,
    name,
    top_ids,
)

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


def table(*, quick: bool) -> list[Shares]:
    tokens = 20_000 if quick else 200_000
    grid = [(noise, length, 8) for noise in (0.01, 0.03, 0.1) for length in (64, 256, 1024)]
    grid += [(0.03, 256, top_k) for top_k in (4, 16, 64)]
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
