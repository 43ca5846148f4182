"""Kept tokens: exact by enumeration, right in compiled code, and wrong variants are seen.

The proof of docs/exactness.md is carried out in numbers for random policies (`written_law`), the
compiled rule is compared with the written one draw by draw, and whole samples with enumerated laws
by chi-square. Each chi-square fails right code with probability 1e-5 per seed; 12 must pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness.model import Codes, Doubles, draw, listed, mixture, random_policy
from benchmarks.exactness.pure import Kept, Rule, World, default_world, follow, specrl, verify
from benchmarks.exactness.stats import distance
from rollout.acceptance import TopKDistributions, verify_kept

FALSE_ALARM = 1e-5
NO_TAIL = -np.inf


# The rule as written, for one position and whole distributions.


def admitted(q: Doubles, p: Doubles, k_q: int, k_p: int) -> list[int]:
    """A = topK(q) & topK(p), of tokens that have mass under both."""
    best = [set(np.argsort(-law, kind="stable")[:k].tolist()) for law, k in ((q, k_q), (p, k_p))]
    return sorted(x for x in best[0] & best[1] if q[x] > 0 and p[x] > 0)


def residual(q: Doubles, p: Doubles, a: list[int], w: float) -> Doubles:
    """max(w p - q_A, 0), not rescaled."""
    q_a = np.zeros_like(q)
    q_a[a] = q[a]
    return np.maximum(w * p - q_a, 0.0)


Step = tuple[Doubles, Doubles, list[int]]


def chances(tokens: list[int], steps: list[Step], block: bool) -> tuple[list[float], list[float]]:
    """Of one row: for each i = 1 .. n the probability to hold at i, and the weights w_0 .. w_n."""
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


def lengths_law(holds: list[float], block: bool) -> list[float]:
    """P(k tokens are accepted) for k = 0 .. n."""
    n = len(holds)
    if block:  # the last i that holds
        return [
            (holds[k - 1] if k else 1.0) * float(np.prod([1 - h for h in holds[k:]]))
            for k in range(n + 1)
        ]
    out = [float(np.prod(holds[:k])) * (1 - holds[k]) for k in range(n)]
    return [*out, float(np.prod(holds))]


def written_law(world: World, length: int, k_q: int, k_p: int, block: bool) -> Doubles:
    """The law of what comes out when `length` tokens were kept, by enumeration.

    Sums over all kept texts, numbers of accepted tokens and tokens placed after them.
    """
    vocabulary, total = world.new.vocabulary, world.new.length
    law = np.zeros([vocabulary] * total)
    for text in itertools.product(range(vocabulary), repeat=length):
        steps, drawn = [], 1.0
        padded = np.array([[*text, *[0] * (total - length)]])
        olds, news = world.old.along(padded)[0], world.new.along(padded)[0]
        for q, p, x in zip(olds, news, text, strict=False):
            steps.append((q, p, admitted(q, p, k_q, k_p)))
            drawn *= q[x]
        holds, weights = chances(list(text), steps, block)
        for k, chance in enumerate(lengths_law(holds, block)):
            if drawn * chance == 0.0:
                continue
            if k < length:
                left = residual(*steps[k], weights[k])
                following = left / left.sum()
            else:
                following = None
            law += drawn * chance * continued(world, text[:k], following)
    return law.ravel()


def continued(world: World, start: tuple[int, ...], following: Doubles | None) -> Doubles:
    """Law of sequences that begin with `start`, then one token as said, then the new policy."""
    shape = [world.new.vocabulary] * world.new.length
    law = np.zeros(shape)
    for cell in np.ndindex(*shape):
        if cell[: len(start)] != start:
            continue
        tables = world.new.along(np.array([cell]))[0]
        factors = [tables[i][cell[i]] for i in range(len(start), len(cell))]
        if following is not None:
            factors[0] = following[cell[len(start)]]
        law[cell] = np.prod(factors)
    return law


def small_world(seed: int, top_p: float, drift: float) -> World:
    old, other = (random_policy(seed + i, vocabulary=3, length=3, peaked=0.6) for i in (0, 1))
    return World(mixture(old, old, 0.0, top_p), mixture(old, other, drift, top_p))


@settings(deadline=None, max_examples=30)
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
    world = small_world(seed, top_p, drift)
    np.testing.assert_allclose(
        written_law(world, length, k_q, k_p, block), world.new.law(), atol=1e-12
    )


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), length=st.integers(1, 3))
def test_by_block_no_prefix_is_kept_less_often(seed: int, k: int, length: int) -> None:
    world = small_world(seed, 1.0, 0.5)
    for text in itertools.product(range(3), repeat=length):
        padded = np.array([[*text, *[0] * (3 - length)]])
        steps = [
            (q, p, admitted(q, p, k, k))
            for q, p in zip(world.old.along(padded)[0], world.new.along(padded)[0], strict=True)
        ][:length]
        kept = {}
        for block in (False, True):
            holds, _ = chances(list(text), steps, block)
            law = lengths_law(holds, block)
            kept[block] = np.cumsum(law[::-1])[::-1]
        # P(all of a row stays); a prefix is a row too, as what follows does not change it.
        assert kept[True][length] >= kept[False][length] - 1e-12


# The compiled rule against the written one.


@st.composite
def batches(draw_: st.DrawFn) -> tuple[list[list[int]], Doubles, Doubles, int, int, int]:
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    lengths = draw_(st.lists(st.integers(0, 4), max_size=5))
    vocabulary = 4
    total = sum(lengths)
    coarse = draw_(st.booleans())  # coarse tables are full of ties and zeros

    def laws() -> Doubles:
        weights = rng.integers(0, 3, (total, vocabulary)) if coarse else rng.random((total, 4)) ** 3
        weights = weights + np.eye(vocabulary)[rng.integers(0, vocabulary, total)]
        return np.asarray(weights / weights.sum(1, keepdims=True))

    q = laws()
    p = q if draw_(st.booleans()) else laws()
    tokens = draw(rng, q)
    cut = np.cumsum([0, *lengths])
    rows = [tokens[a:b].tolist() for a, b in itertools.pairwise(cut)]
    k_q, k_p = draw_(st.integers(0, 4)), draw_(st.integers(1, 4))
    return rows, q, p, k_q, k_p, int(rng.integers(2**32))


def judged(
    rows: list[list[int]], q: Doubles, p: Doubles, k: tuple[int, int], seed: int, block: bool
) -> tuple[list[tuple[int, int, float]], Doubles, list[int]]:
    """`verify_kept`; also the uniforms and tail draws that it was given."""
    rng = np.random.default_rng(seed)
    tokens = np.array([x for row in rows for x in row], np.int64)
    now = listed(tokens, p, k[1])
    inside = np.zeros_like(p)
    for row, ids in enumerate(now.topk_ids):
        inside[row, ids[ids >= 0]] = 1
    tails = np.array(
        [
            rng.choice(4, p=law / law.sum()) if law.sum() > 0 else -1
            for law in np.where(inside == 1, 0.0, p)
        ],
        np.int64,
    )
    tail_logprobs = np.log(
        p[np.arange(len(p)), tails], where=tails >= 0, out=np.full(len(p), NO_TAIL)
    )
    uniforms = rng.random((len(tokens), 2))
    verdicts = verify_kept(
        tokens,
        listed(tokens, q, k[0]),
        now,
        tail_ids=tails,
        tail_logprobs=tail_logprobs,
        offsets=np.cumsum([0, *map(len, rows)]),
        uniforms=uniforms,
        block=block,
    )
    found = zip(verdicts.accepted, verdicts.token, verdicts.logprob, strict=True)
    return [(int(a), int(t), float(log)) for a, t, log in found], uniforms, tails.tolist()


@settings(deadline=None)
@given(batches(), st.booleans())
def test_compiled_it_is_the_rule_as_written(
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
        holds, weights = chances(tokens, steps, block)
        # Within rounding of a probability either outcome is right; the seeds are random numbers.
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


def test_where_nothing_changed_all_is_kept() -> None:
    rng = np.random.default_rng(0)
    policy = random_policy(0, vocabulary=4, length=4)
    text = policy.sample(rng, 500)
    laws = policy.along(text).reshape(-1, 4)
    for block in (False, True):
        rows = text.tolist()
        found, _, _ = judged(rows, laws, laws, (4, 4), 1, block)
        assert found == [(4, -1, pytest.approx(np.nan, nan_ok=True))] * 500


# Whole samples against enumerated laws.


def p_value(world: World, rule: Rule, samples: int = 40_000, seed: int = 0) -> float:
    law = world.new.law()
    cells, notes = follow(rule)(world, np.random.default_rng(seed), samples)
    assert 0.05 < notes["accepted"] / notes["drafted"] < 0.999
    counts = np.stack([np.bincount(cells[i::2], minlength=len(law)) for i in (0, 1)])
    return distance(counts, law).p_value


WORLDS = {
    "top-p": default_world(),
    "all tokens": default_world(top_p=1.0),
    "another policy": default_world(drift=1.0, top_p=1.0),
    "K = 1": replace(default_world(), top_k=1),
}


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("name", list(WORLDS))
def test_verified_samples_follow_the_new_policy(name: str, block: bool) -> None:
    assert p_value(WORLDS[name], verify(block=block)) > FALSE_ALARM


def _outside_is_accepted(world: World, kept: Kept, rng: np.random.Generator) -> tuple[Codes, Codes]:
    """The drawn token's own log-probability is known, so it joins the lists: A looks at x."""

    def with_own(known: TopKDistributions) -> TopKDistributions:
        new = ~(known.topk_ids == kept.tokens[:, None]).any(1) & np.isfinite(known.logprobs)
        ids = np.where(new, kept.tokens, -1)[:, None].astype(np.int32)
        values = np.where(new, known.logprobs, -np.inf)[:, None].astype(np.float32)
        return TopKDistributions(
            known.logprobs,
            np.concatenate([known.topk_ids, ids], 1),
            np.concatenate([known.topk_logprobs, values], 1),
        )

    now = with_own(listed(kept.tokens, kept.new, world.top_k))
    drawn = with_own(listed(kept.tokens, kept.old, world.top_k))
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


def _replaced(block: bool, law: Callable[[World, Doubles, Doubles], Doubles]) -> Rule:
    """The right number of tokens kept, then a token from a wrong residual."""

    def rule(world: World, kept: Kept, rng: np.random.Generator) -> tuple[Codes, Codes]:
        accepted, token = verify(block=block)(world, kept, rng)
        at = (kept.offsets[:-1] + accepted)[token >= 0]
        wrong = law(world, kept.old[at], kept.new[at])
        gone = wrong.sum(1) <= 0
        wrong[gone] = kept.new[at][gone]
        out = token.copy()
        out[token >= 0] = draw(rng, wrong)
        return accepted, out

    return rule


def _unrestricted(world: World, q: Doubles, p: Doubles) -> Doubles:
    return np.maximum(p - q, 0.0)


def _none(world: World, q: Doubles, p: Doubles) -> Doubles:
    return p.copy()


def _of_one_token(world: World, q: Doubles, p: Doubles) -> Doubles:
    """The residual of the token-by-token rule, w = 1."""
    out = np.empty_like(p)
    for i, (old, new) in enumerate(zip(q, p, strict=True)):
        out[i] = residual(old, new, admitted(old, new, world.top_k, world.top_k), 1.0)
    return out


WRONG: dict[str, Rule] = {
    "A looks at the drawn token": _outside_is_accepted,
    "the residual forgets A": _replaced(False, _unrestricted),
    "no residual": _replaced(False, _none),
    "no residual, by block": _replaced(True, _none),
    "by block with the residual of one token": _replaced(True, _of_one_token),
    "SPEC-RL, l = 1": specrl(1.0),
}


APART, MANY = default_world(drift=1.0, top_p=1.0), 120_000
TOP_K = {"by block with the residual of one token": 4}
"""With all tokens listed the weights of a block differ most from 1."""


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_variants_are_seen(name: str) -> None:
    """The same test at the same size; a thousand times clearer than what passes."""
    world = replace(APART, top_k=TOP_K.get(name, 2))
    assert p_value(world, WRONG[name], MANY) < FALSE_ALARM / 1000


def test_the_right_rules_pass_where_the_wrong_ones_are_seen() -> None:
    for top_k in (2, 4):
        world = replace(APART, top_k=top_k)
        assert p_value(world, verify(block=False), MANY) > FALSE_ALARM
        assert p_value(world, verify(block=True), MANY) > FALSE_ALARM
