"""Kept tokens: the rules are exact by enumeration, and compiled code equals the reference.

The proofs of docs/exactness.md are carried out in numbers for random policies
(`reference_verification`), and the compiled rule is compared with the reference draw by draw. None
of this is statistical.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_verification import (
    accepted_distribution,
    admitted,
    emitted_distribution,
    hold_probabilities,
    residual,
)

from benchmarks.exactness.model import Doubles, draw, mixture, random_policy, top_k_of
from benchmarks.exactness.pure import PolicyPair
from rollout.acceptance import verify_kept

NO_TAIL = -np.inf


def small_pair(seed: int, top_p: float, drift: float) -> PolicyPair:
    old, other = (random_policy(seed + i, vocabulary=3, length=3, peaked=0.6) for i in (0, 1))
    return PolicyPair(mixture(old, old, 0.0, top_p), mixture(old, other, drift, top_p))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    top_p=st.sampled_from([1.0, 0.8]),
    drift=st.sampled_from([0.05, 0.4, 1.0]),
    length=st.integers(0, 3),
    k_q=st.integers(0, 3),
    k_p=st.integers(1, 3),
)
@pytest.mark.parametrize("block", [False, True])
def test_the_rules_reproduce_the_new_policy_by_enumeration(
    block: bool, seed: int, top_p: float, drift: float, length: int, k_q: int, k_p: int
) -> None:
    pair = small_pair(seed, top_p, drift)
    np.testing.assert_allclose(
        emitted_distribution(pair, length, k_q, k_p, block),
        pair.new.sequence_distribution(),
        atol=1e-12,
    )


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), length=st.integers(1, 3))
def test_by_block_keeps_no_prefix_less_often(seed: int, k: int, length: int) -> None:
    pair = small_pair(seed, 1.0, 0.5)
    for text in itertools.product(range(3), repeat=length):
        padded = np.array([[*text, *[0] * (3 - length)]])
        steps = [
            (q, p, admitted(q, p, k, k))
            for q, p in zip(pair.old.along(padded)[0], pair.new.along(padded)[0], strict=True)
        ][:length]
        kept = {}
        for block in (False, True):
            holds, _ = hold_probabilities(list(text), steps, block)
            probabilities = accepted_distribution(holds, block)
            kept[block] = np.cumsum(probabilities[::-1])[::-1]
        # P(the whole row is kept). A prefix is a row too: what follows does not change it.
        assert kept[True][length] >= kept[False][length] - 1e-12


# The compiled rule against the reference.


@st.composite
def batches(draw_: st.DrawFn) -> tuple[list[list[int]], Doubles, Doubles, int, int, int]:
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    lengths = draw_(st.lists(st.integers(0, 4), max_size=5))
    vocabulary = 4
    total = sum(lengths)
    coarse = draw_(st.booleans())  # coarse tables are full of ties and zeros

    def distributions() -> Doubles:
        weights = rng.integers(0, 3, (total, vocabulary)) if coarse else rng.random((total, 4)) ** 3
        weights = weights + np.eye(vocabulary)[rng.integers(0, vocabulary, total)]
        return np.asarray(weights / weights.sum(1, keepdims=True))

    q = distributions()
    p = q if draw_(st.booleans()) else distributions()
    tokens = draw(rng, q)
    cut = np.cumsum([0, *lengths])
    rows = [tokens[a:b].tolist() for a, b in itertools.pairwise(cut)]
    k_q, k_p = draw_(st.integers(0, 4)), draw_(st.integers(1, 4))
    return rows, q, p, k_q, k_p, int(rng.integers(2**32))


def judged(
    rows: list[list[int]], q: Doubles, p: Doubles, k: tuple[int, int], seed: int, block: bool
) -> tuple[list[tuple[int, int, float]], Doubles, list[int]]:
    """The result of `verify_kept`, and the uniforms and tail draws it was given."""
    rng = np.random.default_rng(seed)
    tokens = np.array([x for row in rows for x in row], np.int64)
    now = top_k_of(tokens, p, k[1])
    inside = np.zeros_like(p)
    for row, ids in enumerate(now.topk_ids):
        inside[row, ids[ids >= 0]] = 1
    tails = np.array(
        [
            rng.choice(4, p=tail / tail.sum()) if tail.sum() > 0 else -1
            for tail in np.where(inside == 1, 0.0, p)
        ],
        np.int64,
    )
    tail_logprobs = np.log(
        p[np.arange(len(p)), tails], where=tails >= 0, out=np.full(len(p), NO_TAIL)
    )
    uniforms = rng.random((len(tokens), 2))
    verdicts = verify_kept(
        tokens,
        top_k_of(tokens, q, k[0]),
        now,
        tail_ids=tails,
        tail_logprobs=tail_logprobs,
        offsets=np.cumsum([0, *map(len, rows)]),
        uniforms=uniforms,
        block=block,
    )
    found = zip(verdicts.accepted, verdicts.token, verdicts.logprob, strict=True)
    return [(int(a), int(t), float(log)) for a, t, log in found], uniforms, tails.tolist()


@given(batches(), st.booleans())
def test_the_compiled_rule_equals_the_reference(
    batch: tuple[list[list[int]], Doubles, Doubles, int, int, int], block: bool
) -> None:
    rows, q, p, k_q, k_p, seed = batch
    q, p = (
        np.exp(np.log(a, where=a > 0, out=np.full_like(a, NO_TAIL)).astype(np.float32))
        for a in (q, p)
    )
    q, p = q.astype(np.float64), p.astype(np.float64)
    found, uniforms, tails = judged(rows, q, p, (k_q, k_p), seed, block)
    start = 0
    for tokens, (accepted, token, logprob) in zip(rows, found, strict=True):
        steps = [
            (q[at], p[at], admitted(q[at], p[at], k_q, k_p))
            for at in range(start, start + len(tokens))
        ]
        holds, weights = hold_probabilities(tokens, steps, block)
        # Within rounding of h either outcome would be right; random numbers do not come that close.
        held = [u < h for u, h in zip(uniforms[start:, 0], holds, strict=False)]
        if block:
            want = max((i + 1 for i, h in enumerate(held) if h), default=0)
        else:
            want = list(itertools.accumulate(held, lambda x, y: x and y)).count(True)
        assert accepted == want
        assert all(x in steps[i][2] for i, x in enumerate(tokens[:accepted]))
        if accepted == len(tokens):
            assert token == -1
            assert np.isnan(logprob)
        else:
            at, left = start + accepted, residual(*steps[accepted], weights[accepted])
            assert p[at, token] > 0
            assert logprob == pytest.approx(np.log(p[at, token]), abs=1e-6)
            order = np.argsort(-p[at], kind="stable")[:k_p]
            listed_mass = left[order]
            if left.sum() > 1e-6:
                assert left[token] > 0
                cut = uniforms[at, 1] * left.sum()
                inside = np.flatnonzero(cut < np.cumsum(listed_mass))
                assert token == (order[inside[0]] if len(inside) else tails[at])
        start += len(tokens)


def test_an_unchanged_policy_keeps_everything() -> None:
    rng = np.random.default_rng(0)
    policy = random_policy(0, vocabulary=4, length=4)
    text = policy.sample(rng, 500)
    same = policy.along(text).reshape(-1, 4)
    for block in (False, True):
        rows = text.tolist()
        found, _, _ = judged(rows, same, same, (4, 4), 1, block)
        assert found == [(4, -1, pytest.approx(np.nan, nan_ok=True))] * 500
