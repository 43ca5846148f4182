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
    Step,
    accepted_distribution,
    best,
    emitted_distribution,
    hold_probabilities,
)

from asyncrl.rollout.acceptance import symbols_of, verify_kept
from benchmarks.exactness.model import Doubles, draw, log_of_listed, mixture, random_policy
from benchmarks.exactness.pure import PolicyPair

VOCABULARY = 4


def small_pair(seed: int, top_p: float, drift: float) -> PolicyPair:
    old, other = (random_policy(seed + i, vocabulary=4, length=3, peaked=0.6) for i in (0, 1))
    return PolicyPair(mixture(old, old, 0.0, top_p), mixture(old, other, drift, top_p))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    top_p=st.sampled_from([1.0, 0.8]),
    drift=st.sampled_from([0.05, 0.4, 1.0]),
    length=st.integers(0, 3),
    k=st.integers(0, 4),
    alike=st.sampled_from([0.0, 0.5, 1.0]),
)
@pytest.mark.parametrize("block", [False, True])
def test_the_rules_reproduce_the_new_policy_by_enumeration(
    block: bool, seed: int, top_p: float, drift: float, length: int, k: int, alike: float
) -> None:
    pair = small_pair(seed, top_p, drift)
    np.testing.assert_allclose(
        emitted_distribution(pair, length, k, block, alike),
        pair.new.sequence_distribution(),
        atol=1e-12,
    )


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), k=st.integers(0, 3), length=st.integers(1, 3))
def test_by_block_keeps_no_prefix_less_often(seed: int, k: int, length: int) -> None:
    pair = small_pair(seed, 1.0, 0.5)
    for text in itertools.product(range(3), repeat=length):
        padded = np.array([[*text, *[0] * (3 - length)]])
        steps = [
            Step(q, p, best(q, k))
            for q, p in zip(pair.old.along(padded)[0], pair.new.along(padded)[0], strict=True)
        ][:length]
        symbols = [step.symbol(x) for step, x in zip(steps, text, strict=True)]
        kept = {}
        for block in (False, True):
            holds, _ = hold_probabilities(symbols, steps, block)
            probabilities = accepted_distribution(holds, block)
            kept[block] = np.cumsum(probabilities[::-1])[::-1]
        # P(the whole row is kept). A prefix is a row too: what follows does not change it.
        assert kept[True][length] >= kept[False][length] - 1e-12


# The compiled rule against the reference.


@st.composite
def batches(draw_: st.DrawFn) -> tuple[list[list[int]], Doubles, Doubles, int, int]:
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    lengths = draw_(st.lists(st.integers(0, 4), max_size=5))
    total = sum(lengths)
    coarse = draw_(st.booleans())  # coarse tables are full of ties and zeros

    def distributions() -> Doubles:
        size = (total, VOCABULARY)
        weights = rng.integers(0, 3, size) if coarse else rng.random(size) ** 3
        weights = weights + np.eye(VOCABULARY)[rng.integers(0, VOCABULARY, total)]
        return np.asarray(weights / weights.sum(1, keepdims=True))

    q = distributions()
    p = q if draw_(st.booleans()) else distributions()
    tokens = draw(rng, q)
    cut = np.cumsum([0, *lengths])
    rows = [tokens[a:b].tolist() for a, b in itertools.pairwise(cut)]
    return rows, q, p, draw_(st.integers(0, 4)), int(rng.integers(2**32))


@given(batches(), st.booleans())
def test_the_compiled_rule_equals_the_reference(
    batch: tuple[list[list[int]], Doubles, Doubles, int, int], block: bool
) -> None:
    _assert_it_is_the_reference(*batch, block)


@pytest.mark.parametrize("block", [False, True])
def test_the_compiled_rule_equals_the_reference_in_long_rows(block: bool) -> None:
    """Weights that are carried along matter after the second token; the batches above are short."""
    rng = np.random.default_rng(1)
    q = rng.dirichlet(np.ones(VOCABULARY), 300)
    p = 0.7 * q + 0.3 * rng.dirichlet(np.ones(VOCABULARY), 300)
    rows = draw(rng, q).reshape(50, 6).tolist()
    for k in range(VOCABULARY + 1):
        _assert_it_is_the_reference(rows, q, p, k, k, block)


def _assert_it_is_the_reference(
    rows: list[list[int]], q: Doubles, p: Doubles, k: int, seed: int, block: bool
) -> None:
    rng = np.random.default_rng(seed)
    lists = np.full((len(q), k), -1, np.int32)
    for at in range(len(q)):
        own = best(q[at], k)
        lists[at, : len(own)] = own
    # As the rule sees them: the listed ones in float32, the rest of 1 in the tail.
    q, p = (_as_reported(a, lists) for a in (q, p))
    tokens = np.array([x for row in rows for x in row], np.int32)
    tail = (lists != tokens[:, None]).all(axis=1)
    renamed = tail & (rng.random(len(tokens)) < 0.3)
    uniforms = rng.random((len(tokens), 2))
    verdicts = verify_kept(
        symbols_of(tokens, lists),
        log_of_listed(q, lists),
        log_of_listed(p, lists),
        offsets=np.cumsum([0, *map(len, rows)]),
        uniforms=uniforms,
        renamed=renamed,
        block=block,
    )
    start = 0
    for row, whole in enumerate(rows):
        ends = np.flatnonzero(renamed[start : start + len(whole)])
        length = int(ends[0]) + 1 if len(ends) else len(whole)
        steps = [Step(q[at], p[at], lists[at][lists[at] >= 0].tolist())
                 for at in range(start, start + length)]  # fmt: skip
        symbols = [step.symbol(x) for step, x in zip(steps, whole, strict=False)]
        holds, weights = hold_probabilities(symbols, steps, block)
        # Within rounding of h either outcome would be right; random numbers do not come that close.
        held = [u < h for u, h in zip(uniforms[start:, 0], holds, strict=False)]
        if block:
            want = max((i + 1 for i, h in enumerate(held) if h), default=0)
        else:
            want = list(itertools.accumulate(held, lambda x, y: x and y)).count(True)
        found = int(verdicts.accepted[row]), int(verdicts.symbol[row]), bool(verdicts.renamed[row])
        if want == length and len(ends):
            assert found == (length - 1, k, True)
        elif want == length:
            assert found == (length, -1, False)
        else:
            assert (found[0], found[2]) == (want, False)
            left = steps[want].residual(weights[want])
            if left.sum() > 1e-6:
                cut = uniforms[start + want, 1] * left.sum()
                place = int(np.flatnonzero(cut < np.cumsum(left))[0])
                assert found[1] == (place if place < len(left) - 1 else k)
        start += len(whole)


def _as_reported(distributions: Doubles, lists: np.ndarray) -> Doubles:
    """Listed tokens rounded to float32 of their logarithm; the tail rescaled to what they leave."""
    out = distributions.copy()
    for at, ids in enumerate(lists):
        own = ids[ids >= 0]
        with np.errstate(divide="ignore"):
            out[at, own] = np.exp(np.log(out[at, own]).astype(np.float32).astype(np.float64))
        other = np.setdiff1d(np.arange(out.shape[1]), own)
        rest = out[at, other].sum()
        if rest > 0:
            out[at, other] *= max(1.0 - out[at, own].sum(), 0.0) / rest
    return out


def test_an_unchanged_policy_keeps_everything() -> None:
    rng = np.random.default_rng(0)
    policy = random_policy(0, vocabulary=4, length=4)
    text = policy.sample(rng, 500)
    same = policy.along(text).reshape(-1, 4)
    lists = np.argsort(-same, axis=1)[:, :2].astype(np.int32)
    logs = log_of_listed(same, lists)
    for block in (False, True):
        verdicts = verify_kept(
            symbols_of(text.ravel().astype(np.int32), lists), logs, logs,
            offsets=np.arange(501) * 4, uniforms=rng.random((2000, 2)), block=block,
        )  # fmt: skip
        assert (verdicts.accepted == 4).all()
        assert (verdicts.symbol == -1).all()
