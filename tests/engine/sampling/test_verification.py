"""The verdict that both engines share, on policies of which every response can be enumerated.

A Markov chain over V tokens is the policy, so its distributions are rows of one table. Responses of
an old policy are verified and continued under a second one, and the result under a third. They must
follow the policy that judged them: chi-square over all V^L responses (`false_alarms`). Seeds are
fixed.

Noise in the place of a rejected token need not be fresh: a tail token is rejected only where the
residual has no tail, so the residual's tail comes after listed tokens, whose noise is unused. Hence
there is no such mutant here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from false_alarms import Claims, is_caught
from numpy.typing import NDArray
from scipy.stats import chi2

from asyncrl.engine.sampling.drawing import Streams, draw, noise_seeds, top_k
from asyncrl.engine.sampling.logits import ProcessedRows
from asyncrl.engine.sampling.truncation import Purpose, forked, uniforms
from asyncrl.engine.sampling.verification import (
    KeptBatch,
    KeptColumns,
    Reading,
    judge,
)
from asyncrl.rollout.acceptance import symbols_of, verify_kept
from asyncrl.rollout.trajectory import FloatArray, IntArray, KeptTokens, SeedArray

CLAIMS = Claims(__file__)
V, K, L = 6, 2, 4
N = 20_000
START = V
"""Row of the table that the first token is drawn from."""


def policy(seed: int, *, truncated: bool = False) -> torch.Tensor:
    """`[V + 1, V]` log-probabilities after each token; truncated: some have no mass."""
    logits = np.random.default_rng(0).normal(size=(V + 1, V))
    logits += np.random.default_rng(seed).normal(size=logits.shape)
    if truncated:
        logits[logits < logits.max(axis=1, keepdims=True) - 2.5] = -np.inf
    return torch.from_numpy(logits).log_softmax(1).float()


@dataclass(frozen=True)
class Texts:
    """N responses of L tokens, with what was known of each draw; `[N, L, ...]`."""

    tokens: IntArray
    ids: IntArray
    values: FloatArray
    noise: SeedArray

    def rows(self) -> NDArray[np.int64]:
        """`[N, L]` row of the table that each token is drawn from."""
        first = np.full((len(self.tokens), 1), START)
        return np.concatenate([first, self.tokens[:, :-1]], axis=1).astype(np.int64)

    def kept(self, length: int = L) -> list[KeptTokens]:
        unused = np.zeros(length, np.float32)
        return [
            KeptTokens(t[:length], unused, i[:length], v[:length], s[:length])
            for t, i, v, s in zip(self.tokens, self.ids, self.values, self.noise, strict=True)
        ]


def empty(n: int) -> Texts:
    return Texts(
        np.zeros((n, L), np.int32),
        np.full((n, L, K), -1, np.int32),
        np.full((n, L, K), -np.inf, np.float32),
        np.zeros((n, L), np.uint64),
    )


def go_on(
    texts: Texts, known: NDArray[np.int64], table: torch.Tensor, seeds: SeedArray, version: int
) -> Texts:
    """Draw every token from the `known`-th on, in place."""
    for at in range(L):
        rows = np.flatnonzero(known <= at)
        noise = noise_seeds(seeds[rows], version)
        streams = Streams(seeds[rows], np.full(len(rows), at), noise)
        drawn = draw(table, K, streams, texts.rows()[rows, at])
        texts.tokens[rows, at] = drawn.tokens.numpy()
        texts.ids[rows, at], texts.values[rows, at] = drawn.listed.ids, drawn.listed.logprobs
        texts.noise[rows, at] = noise
    return texts


def drawn_by(table: torch.Tensor, n: int = N, first_seed: int = 0) -> Texts:
    seeds = np.arange(first_seed, first_seed + n).astype(np.uint64)
    return go_on(empty(n), np.zeros(n, np.int64), table, seeds, 0)


@dataclass(frozen=True)
class Rule:
    """How texts are verified; the right way, or a mutant."""

    reading: Callable[[KeptBatch, Reading], Reading] = lambda _, reading: reading
    """Changes what is read before it is judged."""
    not_cut: bool = False
    """Renames tail tokens and keeps what follows them."""
    current_lists: bool = False
    """Gives verified tokens the most probable ones of the policy that verified them."""
    old_label: bool = False
    """Says of the token in the place of a rejected one that the old noise drew it."""


def verified(
    texts: Texts, table: torch.Tensor, version: int, rule: Rule, length: int = L
) -> tuple[Texts, int]:
    """The texts verified and continued under a policy, and how many tokens were accepted."""
    n = len(texts.tokens)
    seeds = (np.arange(n) + (version << 40)).astype(np.uint64)
    batch = KeptBatch.of(texts.kept(length), seeds, np.zeros(n, np.int64), K)
    rows = texts.rows()[:, :length].reshape(-1)
    right = ProcessedRows(table).read(rows, batch.columns)
    verdict = judge(batch, rule.reading(batch, right), version)
    unnamed = np.flatnonzero(verdict.unnamed)
    at = verdict.place(batch, unnamed)
    ProcessedRows(table).name_tokens(batch, verdict, unnamed, rows[at])
    out = empty(n)
    stays = np.arange(length) < verdict.accepted[:, None]
    names = right.names.reshape(n, length) if rule.not_cut else texts.tokens[:, :length]
    out.tokens[:, :length][stays] = names[stays]
    known = verdict.accepted.astype(np.int64)
    extra = np.flatnonzero(verdict.token >= 0)
    out.tokens[extra, known[extra]] = verdict.token[extra]
    out.noise[:, :length] = texts.noise[:, :length]
    if not rule.old_label:
        out.noise[extra, known[extra]] = verdict.noise_seed[extra]
    out.ids[:, :length] = texts.ids[:, :length]
    out.values[:, :length] = right.listed.reshape(n, length, K)
    if rule.current_lists:
        listed = top_k(table, K, rows)
        out.ids[:, :length] = listed.ids.numpy().reshape(n, length, K)
        out.values[:, :length] = listed.logprobs.numpy().reshape(n, length, K)
    known[extra] += 1
    return go_on(out, known, table, seeds, version), int(verdict.accepted.sum())


def p_value(texts: Texts, table: torch.Tensor) -> float:
    """Of the texts under the policy."""
    every = np.stack(np.unravel_index(np.arange(V**L), (V,) * L), axis=1).astype(np.int32)
    logprobs = table.numpy()[replace(empty(1), tokens=every).rows(), every].sum(axis=1)
    want = np.exp(logprobs.astype(np.float64)) * len(texts.tokens)
    have = np.bincount(np.ravel_multi_index(tuple(texts.tokens.T), (V,) * L), minlength=V**L)
    if have[want == 0].any():
        return 0.0
    rare = (want > 0) & (want < 8)
    cells, counts = want[want >= 8], have[want >= 8]
    if rare.any():
        cells, counts = np.append(cells, want[rare].sum()), np.append(counts, have[rare].sum())
    return float(chi2.sf(((counts - cells) ** 2 / cells).sum(), len(cells) - 1))


def unnamed_again(batch: KeptBatch, reading: Reading) -> Reading:
    """No tail token gets another name."""
    return reading._replace(names=batch.columns.tokens.astype(np.int64))


MUTANTS = {
    "old identity kept": Rule(reading=unnamed_again),
    "row not cut": Rule(reading=unnamed_again, not_cut=True),
}


@pytest.mark.parametrize("truncated", [False, True])
def test_verified_texts_follow_each_policy_in_turn(truncated: bool) -> None:
    """And a policy accepts all of what it has verified: lists and noise are those of the draws."""
    old, new, third = (policy(seed, truncated=truncated) for seed in (1, 2, 3))
    texts = drawn_by(old)
    tail = (symbols_of(texts.tokens.reshape(-1), texts.ids.reshape(-1, K)) == K).mean()
    once, first = verified(texts, new, 1, Rule(), length=3)
    twice, second = verified(once, third, 2, Rule())
    p = p_value(once, new), p_value(twice, third)
    print(f"outside the list {tail:.2f}, accepted {first / N:.2f} and {second / N:.2f}, p = {p}")
    assert tail > 0.2
    assert all(map(CLAIMS.fit, p))
    assert min(first, second) > N / 3
    _, again = verified(once, new, 3, Rule())
    assert again == N * L


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_do_not(name: str) -> None:
    old, new, third = (policy(seed) for seed in (1, 2, 3))
    rule = MUTANTS[name]
    once, _ = verified(drawn_by(old), new, 1, rule, length=3)
    twice, _ = verified(once, third, 2, rule)
    print(f"{name}: p = {p_value(once, new):.3g}, {p_value(twice, third):.3g}")
    assert is_caught(p_value(twice, third))


@pytest.mark.parametrize("rule", [Rule(current_lists=True), Rule(old_label=True)])
def test_wrong_lists_and_wrong_noise_are_not_accepted_again(rule: Rule) -> None:
    """By the policy that verified, which accepts everything otherwise."""
    old, new = policy(1), policy(2)
    once, _ = verified(drawn_by(old, 2000), new, 1, rule)
    _, again = verified(once, new, 2, Rule())
    assert again < 2000 * L - 100


def test_parts_and_batches_change_nothing() -> None:
    """A reading may come in parts, and rows may be judged alone or with others."""
    new, texts = policy(2), drawn_by(policy(1), 40)
    kept = texts.kept()
    kept[3], kept[7] = (replace(kept[i], lenience=1.5) for i in (3, 7))
    seeds, first = np.arange(40).astype(np.uint64), np.arange(40) % 3
    batch, rows = KeptBatch.of(kept, seeds, first, K), texts.rows().reshape(-1)
    whole = ProcessedRows(new).read(rows, batch.columns)
    columns = [batch.columns.part(slice(at, at + 23)) for at in range(0, 160, 23)]
    parts = [
        ProcessedRows(new).read(rows[at * 23 : at * 23 + 23], part)
        for at, part in enumerate(columns)
    ]
    for one, other in zip(Reading.concatenated(parts), whole, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(KeptColumns.concatenated(columns), batch.columns, strict=True):
        np.testing.assert_array_equal(one, other)
    verdict = judge(batch, whole, 5)
    assert (verdict.token[[3, 7]] == -1).all()
    for i in range(40):
        # Also with room for longer lists than there are.
        alone = KeptBatch.of(kept[i : i + 1], seeds[i : i + 1], first[i : i + 1], K + i % 2)
        single = judge(alone, ProcessedRows(new).read(texts.rows()[i], alone.columns), 5)
        for name in ("accepted", "token", "logprob", "noise_seed", "renamed", "unnamed"):
            assert getattr(single, name)[0] == pytest.approx(
                getattr(verdict, name)[i], nan_ok=True
            ), name


def test_a_verdict_says_what_its_token_is() -> None:
    """In the list, renamed, or outside and named by fresh noise: with probability and noise."""
    new, texts = policy(2), drawn_by(policy(1), 2000)
    seeds = (np.arange(2000) + (1 << 40)).astype(np.uint64)
    batch, rows = KeptBatch.of(texts.kept(), seeds, np.zeros(2000, np.int64), K), texts.rows()
    verdict = judge(batch, ProcessedRows(new).read(rows.reshape(-1), batch.columns), 1)
    unnamed = verdict.unnamed.copy()
    at = verdict.place(batch, np.flatnonzero(unnamed))
    ProcessedRows(new).name_tokens(batch, verdict, np.flatnonzero(unnamed), rows.reshape(-1)[at])
    assert not verdict.unnamed.any()
    drawn = np.flatnonzero(verdict.token >= 0)
    place = verdict.accepted[drawn]
    logprobs = new.numpy()[rows[drawn, place], verdict.token[drawn]]
    np.testing.assert_array_equal(verdict.logprob[drawn], logprobs)
    in_list = (texts.ids[drawn, place] == verdict.token[drawn, None]).any(axis=1)
    renamed = verdict.renamed[drawn]
    np.testing.assert_array_equal(in_list, ~(renamed | unnamed[drawn]))
    assert min(in_list.sum(), renamed.sum(), unnamed.sum()) > 10
    fresh = noise_seeds(seeds[drawn], 1)
    old = texts.noise[drawn, place]
    np.testing.assert_array_equal(verdict.noise_seed[drawn], np.where(renamed, old, fresh))
    assert (verdict.token[drawn] != texts.tokens[drawn, place])[renamed].all()
    free = verdict.token < 0
    assert (verdict.accepted[free] == L).all()


def test_a_verdict_is_drawn_with_the_numbers_of_its_purposes_and_positions() -> None:
    """Those that reject a token say nothing of what stands in its place."""
    new, texts, n = policy(2), drawn_by(policy(1), 4000), 4000
    seeds, first = (np.arange(n) + (1 << 40)).astype(np.uint64), np.arange(n) % 3
    batch = KeptBatch.of(texts.kept(), seeds, first, K)
    places = np.arange(L) + first[:, None]
    np.testing.assert_array_equal(batch.columns.positions, places.reshape(-1))
    reading = ProcessedRows(new).read(texts.rows().reshape(-1), batch.columns)
    numbers = [
        uniforms(np.repeat(forked(seeds, purpose, 1), L), places.reshape(-1))
        for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)
    ]
    want = verify_kept(
        symbols_of(texts.tokens.reshape(-1), texts.ids.reshape(-1, K)),
        texts.values.reshape(-1, K),
        reading.listed,
        offsets=np.arange(n + 1) * L,
        uniforms=np.stack(numbers, axis=1),
        renamed=reading.names != texts.tokens.reshape(-1),
    )
    verdict = judge(batch, reading, 1)
    np.testing.assert_array_equal(verdict.accepted, want.accepted)
    np.testing.assert_array_equal(verdict.renamed, want.renamed)
    np.testing.assert_array_equal(verdict.unnamed, (want.symbol == K) & ~want.renamed)
    listed = np.flatnonzero((want.symbol >= 0) & (want.symbol < K))
    assert min(len(listed), verdict.unnamed.sum()) > 10
    tokens = texts.ids[listed, want.accepted[listed], want.symbol[listed]]
    np.testing.assert_array_equal(verdict.token[listed], tokens)


def test_what_is_not_finite_is_named() -> None:
    table, texts = policy(1), drawn_by(policy(1), 3)
    table[int(texts.tokens[1, 0])] = torch.nan
    batch = KeptBatch.of(texts.kept(), np.zeros(3, np.uint64), np.zeros(3, np.int64), K)
    wrong = ProcessedRows(table).read(texts.rows().reshape(-1), batch.columns).not_finite()
    assert wrong[L + 1]
    np.testing.assert_array_equal(wrong.reshape(3, L), texts.rows() == int(texts.tokens[1, 0]))
