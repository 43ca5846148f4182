"""How many kept tokens each rule accepts after a small change of the policy.

The policy is a Markov chain of 64 tokens with about the entropy of a trained model (some 0.5 nats a
token), changed by noise on its logits. docs/exactness.md discusses the numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.exactness.model import Codes, Doubles, draw, tail_draws, top_k_of
from rollout.acceptance import accept_lenient, verify_kept

VOCABULARY = 64


@dataclass(frozen=True)
class Shares:
    """The share of all kept tokens that each rule accepts."""

    length: int
    top_k: int
    tv_per_token: float
    """Mean total variation of the two policies at a position."""
    outside: float
    """Share of tokens that lie outside topK(q) & topK(p)."""
    token: float
    """Accepted token by token."""
    block: float
    """Accepted by block."""
    specrl_1: float
    """SPEC-RL with lenience 1: min(1, p/q) of the drawn token, without lists. Biased."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(noise: float, length: int, top_k: int, rows: int, seed: int = 0) -> Shares:
    """Draw `rows` sequences from a chain and verify them under one changed by `noise`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(VOCABULARY, VOCABULARY)) * 4.0
    old, new = _softmax(logits), _softmax(logits + noise * rng.normal(size=logits.shape))
    text = _chain(rng, old, rows, length)
    before = np.concatenate([np.zeros((rows, 1), np.int64), text[:, :-1]], axis=1).ravel()
    tokens, q, p = text.ravel(), old[before], new[before]
    offsets = np.arange(rows + 1) * length
    drawn, current = top_k_of(tokens, q, top_k), top_k_of(tokens, p, top_k)
    tail_ids, tail_logprobs = tail_draws(rng, p, current.topk_ids)
    uniforms = rng.random((len(tokens), 2))
    kept = {}
    for block in (False, True):
        verdicts = verify_kept(
            tokens, drawn, current, tail_ids=tail_ids, tail_logprobs=tail_logprobs,
            offsets=offsets, uniforms=uniforms, block=block,
        )  # fmt: skip
        kept[block] = float(verdicts.accepted.sum() / len(tokens))
    lenient = accept_lenient(drawn.logprobs, current.logprobs, offsets, uniforms[:, 0], 1.0)
    inside = (drawn.topk_ids == tokens[:, None]).any(1) & (current.topk_ids == tokens[:, None]).any(
        1
    )
    return Shares(
        length=length,
        top_k=top_k,
        tv_per_token=float(0.5 * np.abs(q - p).sum(1).mean()),
        outside=float(1 - inside.mean()),
        token=kept[False],
        block=kept[True],
        specrl_1=float(lenient.sum() / len(tokens)),
    )


def table(quick: bool) -> list[Shares]:
    """Measure all settings that are printed."""
    tokens = 20_000 if quick else 200_000
    grid = [(noise, length, 8) for noise in (0.01, 0.03, 0.1) for length in (64, 256, 1024)]
    grid += [(0.03, 256, top_k) for top_k in (4, 16, 64)]
    return [measure(noise, length, k, max(8, tokens // length)) for noise, length, k in grid]


def _chain(rng: np.random.Generator, table: Doubles, rows: int, length: int) -> Codes:
    text, state = np.empty((rows, length), np.int64), np.zeros(rows, np.int64)
    for at in range(length):
        text[:, at] = state = draw(rng, table[state])
    return text


def _softmax(logits: Doubles) -> Doubles:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))
