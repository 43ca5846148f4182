"""Kept tokens: verified samples against enumerated distributions, and wrong variants are detected.

Each chi-square test fails for correct code with probability 1e-5 per seed; 12 must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from reference_verification import admitted, residual

from benchmarks.exactness.model import Codes, Doubles, draw, top_k_of
from benchmarks.exactness.pure import (
    CutSamples,
    PolicyPair,
    Rule,
    default_pair,
    follow,
    specrl,
    verify,
)
from benchmarks.exactness.stats import distance
from rollout.acceptance import TopKDistributions, verify_kept

FALSE_ALARM = 1e-5
NO_TAIL = -np.inf


def p_value(pair: PolicyPair, rule: Rule, samples: int = 40_000, seed: int = 0) -> float:
    probabilities = pair.new.sequence_distribution()
    cells, notes = follow(rule)(pair, np.random.default_rng(seed), samples)
    assert 0.05 < notes["accepted"] / notes["drafted"] < 0.999
    counts = np.stack([np.bincount(cells[i::2], minlength=len(probabilities)) for i in (0, 1)])
    return distance(counts, probabilities).p_value


PAIRS = {
    "top-p": default_pair(),
    "all tokens": default_pair(top_p=1.0),
    "another policy": default_pair(drift=1.0, top_p=1.0),
    "K = 1": replace(default_pair(), top_k=1),
}


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("name", list(PAIRS))
def test_verified_samples_follow_the_new_policy(name: str, block: bool) -> None:
    assert p_value(PAIRS[name], verify(block=block)) > FALSE_ALARM


def _outside_is_accepted(
    pair: PolicyPair, kept: CutSamples, rng: np.random.Generator
) -> tuple[Codes, Codes]:
    """Adds the drawn token to the lists, because its log-probability is known: A looks at x."""

    def with_own(known: TopKDistributions) -> TopKDistributions:
        new = ~(known.topk_ids == kept.tokens[:, None]).any(1) & np.isfinite(known.logprobs)
        ids = np.where(new, kept.tokens, -1)[:, None].astype(np.int32)
        values = np.where(new, known.logprobs, -np.inf)[:, None].astype(np.float32)
        return TopKDistributions(
            known.logprobs,
            np.concatenate([known.topk_ids, ids], 1),
            np.concatenate([known.topk_logprobs, values], 1),
        )

    now = with_own(top_k_of(kept.tokens, kept.new, pair.top_k))
    drawn = with_own(top_k_of(kept.tokens, kept.old, pair.top_k))
    tail = kept.new.copy()
    row, place = np.nonzero(now.topk_ids >= 0)
    tail[row, now.topk_ids[row, place]] = 0.0
    there = tail.sum(1) > 0
    tail[~there] = 1.0
    ids = np.where(there, draw(rng, tail), -1)
    verdicts = verify_kept(
        kept.tokens,
        drawn,
        now,
        tail_ids=ids,
        tail_logprobs=np.full(len(ids), NO_TAIL),
        offsets=kept.offsets,
        uniforms=rng.random((len(ids), 2)),
        block=False,
    )
    return verdicts.accepted.astype(np.int64), verdicts.token.astype(np.int64)


def _with_wrong_residual(
    block: bool, residual_of: Callable[[PolicyPair, Doubles, Doubles], Doubles]
) -> Rule:
    """Accepts the right number of tokens, then draws from a wrong residual."""

    def rule(pair: PolicyPair, kept: CutSamples, rng: np.random.Generator) -> tuple[Codes, Codes]:
        accepted, token = verify(block=block)(pair, kept, rng)
        at = (kept.offsets[:-1] + accepted)[token >= 0]
        wrong = residual_of(pair, kept.old[at], kept.new[at])
        gone = wrong.sum(1) <= 0
        wrong[gone] = kept.new[at][gone]
        out = token.copy()
        out[token >= 0] = draw(rng, wrong)
        return accepted, out

    return rule


def _unrestricted(pair: PolicyPair, q: Doubles, p: Doubles) -> Doubles:
    return np.maximum(p - q, 0.0)


def _none(pair: PolicyPair, q: Doubles, p: Doubles) -> Doubles:
    return p.copy()


def _of_one_token(pair: PolicyPair, q: Doubles, p: Doubles) -> Doubles:
    """The residual of the token-by-token rule, w = 1."""
    out = np.empty_like(p)
    for i, (old, new) in enumerate(zip(q, p, strict=True)):
        out[i] = residual(old, new, admitted(old, new, pair.top_k, pair.top_k), 1.0)
    return out


WRONG: dict[str, Rule] = {
    "A looks at the drawn token": _outside_is_accepted,
    "the residual forgets A": _with_wrong_residual(False, _unrestricted),
    "no residual": _with_wrong_residual(False, _none),
    "no residual, by block": _with_wrong_residual(True, _none),
    "by block with the residual of one token": _with_wrong_residual(True, _of_one_token),
    "SPEC-RL, l = 1": specrl(1.0),
}


APART, MANY = default_pair(drift=1.0, top_p=1.0), 120_000
TOP_K = {"by block with the residual of one token": 4}
"""With all tokens listed, the weights of a block differ most from 1."""


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_variants_are_detected(name: str) -> None:
    """The same test with as many samples, and a threshold a thousand times stricter."""
    pair = replace(APART, top_k=TOP_K.get(name, 2))
    assert p_value(pair, WRONG[name], MANY) < FALSE_ALARM / 1000


def test_the_right_rules_pass_where_wrong_ones_are_detected() -> None:
    for top_k in (2, 4):
        pair = replace(APART, top_k=top_k)
        assert p_value(pair, verify(block=False), MANY) > FALSE_ALARM
        assert p_value(pair, verify(block=True), MANY) > FALSE_ALARM
