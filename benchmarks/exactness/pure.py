"""Modes that run the acceptance rules alone, on an enumerated model and without an engine.

The drafts, or the kept tokens, come from an older policy, independently for every sample. A rule
that needs the distributions of the kept tokens gets what an engine has: the K = 2 most probable of
four tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.acceptance import (
    Verdicts,
    accept_chain,
    accept_lenient,
    accept_tree,
    symbols_of,
    verify_kept,
)
from benchmarks.exactness.model import (
    Codes,
    Doubles,
    TabularPolicy,
    cells,
    draw,
    draw_in_two_stages,
    log_of_listed,
    mixture,
    name,
    random_policy,
    top_ids,
)

VOCABULARY, LENGTH, TOP_K, TREE_NODES = 4, 4, 2, 6


@dataclass(frozen=True)
class PolicyPair:
    """The old policy, which drew the drafts and kept tokens, and the new one, to be sampled."""

    old: TabularPolicy
    new: TabularPolicy
    top_k: int = TOP_K
    """Listed tokens of each kept token's distributions."""


Outcome = tuple[Codes, dict[str, float]]
"""`[n]` cells, and sums over the samples, such as tokens drafted and accepted."""
Sampler = Callable[[PolicyPair, np.random.Generator, int], Outcome]


def default_pair(drift: float = 0.3, top_p: float = 0.95) -> PolicyPair:
    """Four tokens, length four. At top-p 0.95 some sequences are impossible, some only under q."""
    old = random_policy(1, VOCABULARY, LENGTH)
    other = random_policy(2, VOCABULARY, LENGTH)
    return PolicyPair(mixture(old, old, 0.0, top_p), mixture(old, other, drift, top_p))


def plain(pair: PolicyPair, rng: np.random.Generator, count: int) -> Outcome:
    """No drafts: the control, what the statistics say of plain sampling."""
    return cells(pair.new.sample(rng, count), pair.new.vocabulary), {}


def chain(pair: PolicyPair, rng: np.random.Generator, count: int) -> Outcome:
    """Drafted chains of any length, drawn by the old policy anew after each rejection."""
    length = pair.new.length
    text, done = np.zeros((count, length), np.int64), np.zeros(count, np.int64)
    accepted = drafted = 0
    while (rows := np.flatnonzero(done < length)).size:
        at = done[rows]
        wanted = pair.old.complete(rng, text[rows], at)
        distributions = pair.new.along(wanted)
        draws = draw(rng, distributions.reshape(-1, distributions.shape[2])).reshape(wanted.shape)
        lengths = rng.integers(0, length - at)
        place = np.minimum(at[:, None] + np.arange(length), length - 1)
        samples = np.take_along_axis(draws, place, 1)
        drafts = np.take_along_axis(wanted, place, 1)[:, :-1]
        kept = accept_chain(*(a.astype(np.int32) for a in (samples, drafts, lengths)))
        columns = np.arange(length)
        new = (columns >= at[:, None]) & (columns <= (at + kept)[:, None])
        text[rows] = np.where(new, draws, text[rows])
        done[rows] += kept + 1
        accepted, drafted = accepted + int(kept.sum()), drafted + int(lengths.sum())
    return cells(text, pair.new.vocabulary), {"accepted": accepted, "drafted": drafted}


def tree(pair: PolicyPair, rng: np.random.Generator, count: int) -> Outcome:
    """Random trees of up to six nodes, their tokens drawn by the old policy."""
    length, vocabulary = pair.new.length, pair.new.vocabulary
    text, done = np.zeros((count, length), np.int64), np.zeros(count, np.int64)
    code = np.zeros(count, np.int64)
    accepted = drafted = 0
    while (rows := np.flatnonzero(done < length)).size:
        n = len(rows)
        # Column 0 is the root, j + 1 is node j.
        depth, codes = np.tile(done[rows, None], TREE_NODES + 1), np.tile(code[rows, None], 7)
        parents, tokens = np.full((2, n, TREE_NODES), -1)
        for node in range(TREE_NODES):
            parent = rng.integers(-1, node, n)
            parent[depth[np.arange(n), parent + 1] >= length - 1] = -1
            above = depth[np.arange(n), parent + 1]
            before = codes[np.arange(n), parent + 1]
            parents[:, node] = parent
            tokens[:, node] = draw(rng, pair.old.at(above, before))
            depth[:, node + 1] = np.minimum(above + 1, length - 1)
            codes[:, node + 1] = before * vocabulary + tokens[:, node]
        counts = rng.integers(0, TREE_NODES + 1, n)
        counts[done[rows] == length - 1] = 0
        used = np.arange(TREE_NODES + 1) <= counts[:, None]
        samples = draw(rng, pair.new.at(depth[used], codes[used]))
        nodes = used[:, 1:]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        walks = accept_tree(samples, tokens[nodes], parents[nodes], offsets)
        grown = walks.accepted + 1
        row = np.repeat(np.arange(n), grown)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(grown) - grown, grown)
        text[rows[row], done[rows[row]] + rank] = walks.emitted
        done[rows] += grown
        code[rows] = _codes(text[rows], done[rows], vocabulary)
        accepted, drafted = accepted + len(walks.nodes), drafted + int(counts.sum())
    return cells(text, vocabulary), {"accepted": accepted, "drafted": drafted}


def _codes(text: Codes, done: Codes, vocabulary: int) -> Codes:
    code = np.zeros(len(text), np.int64)
    for at in range(text.shape[1]):
        code = np.where(at < done, code * vocabulary + text[:, at], code)
    return code


@dataclass(frozen=True)
class DrawnRows:
    """n samples of L tokens, each drawn in two stages, with what drew them."""

    text: Codes
    """`[n, L]`"""
    lists: NDArray[np.int32]
    """`[n, L, K]` the list that was fixed before each draw."""
    noise: Doubles
    """`[n, L, V]` what named tokens outside the lists."""


@dataclass(frozen=True)
class CutSamples:
    """n samples of the old policy, each cut at a random place: m kept tokens in all."""

    rows: DrawnRows
    """The whole samples; the first lengths[i] tokens of row i are kept."""
    lengths: Codes
    """`[n]`"""
    tokens: Codes
    """`[m]` the kept tokens, row after row."""
    offsets: Codes
    """`[n+1]` row i's are tokens[offsets[i] : offsets[i+1]]."""
    lists: NDArray[np.int32]
    """`[m, K]`"""
    noise: Doubles
    """`[m, V]`"""
    old: Doubles
    """`[m, V]` the old policy's distribution at each kept token."""
    new: Doubles
    """`[m, V]` the new policy's."""

    def judge(
        self,
        rng: np.random.Generator,
        names: Codes,
        *,
        block: bool,
        renamed: NDArray[np.bool_] | None = None,
    ) -> Verdicts:
        """`verify_kept` with these names of tail tokens."""
        return verify_kept(
            symbols_of(self.tokens.astype(np.int32), self.lists),
            log_of_listed(self.old, self.lists),
            log_of_listed(self.new, self.lists),
            offsets=self.offsets,
            uniforms=rng.random((len(self.tokens), 2)),
            renamed=names != self.tokens if renamed is None else renamed,
            block=block,
        )

    def names(self) -> Codes:
        """`[m]` the kept tokens, those outside their lists as the new policy names them."""
        tail = (self.lists != self.tokens[:, None]).all(axis=1)
        return np.where(tail, name(self.new, self.lists, self.noise), self.tokens)


def draw_rows(
    policy: TabularPolicy, rng: np.random.Generator, k: int, rows: DrawnRows | int, done: Codes
) -> DrawnRows:
    """Samples that keep the first done[i] tokens of their row; the rest is drawn in two stages."""
    length, vocabulary = policy.length, policy.vocabulary
    if isinstance(rows, int):
        rows = DrawnRows(
            np.zeros((rows, length), np.int64),
            np.full((rows, length, k), -1, np.int32),
            np.ones((rows, length, vocabulary)),
        )
    text, lists, noise = rows.text.copy(), rows.lists.copy(), rows.noise.copy()
    code = np.zeros(len(text), np.int64)
    for at, table in enumerate(policy.tables):
        new = np.flatnonzero(done <= at)
        distributions = table[code[new]]
        lists[new, at] = top_ids(distributions, k)
        text[new, at], noise[new, at] = draw_in_two_stages(rng, distributions, lists[new, at])
        code = code * vocabulary + text[:, at]
    return DrawnRows(text, lists, noise)


def cut_samples(pair: PolicyPair, rng: np.random.Generator, rows: DrawnRows) -> CutSamples:
    """Cut samples of the old policy at random, as a weight update does."""
    lengths = rng.integers(0, pair.old.length + 1, len(rows.text))
    cut = np.arange(rows.text.shape[1]) < lengths[:, None]
    return CutSamples(
        rows,
        lengths,
        rows.text[cut],
        np.concatenate([[0], np.cumsum(lengths)]),
        rows.lists[cut],
        rows.noise[cut],
        pair.old.along(rows.text)[cut],
        pair.new.along(rows.text)[cut],
    )


@dataclass(frozen=True)
class Judged:
    """What a rule makes of n rows."""

    accepted: Codes
    """`[n]` tokens that stay."""
    token: Codes
    """`[n]` the token placed after them; -1 for none."""
    noise: Doubles | None = None
    """`[n, V]` the noise that belongs to the placed token; None: the one that was there."""


Rule = Callable[[PolicyPair, CutSamples, np.random.Generator], Judged]


def follow(rule: Rule) -> Sampler:
    """A sampler that applies a rule to kept tokens and completes them with the new policy."""

    def sampler(pair: PolicyPair, rng: np.random.Generator, count: int) -> Outcome:
        drawn = draw_rows(pair.old, rng, pair.top_k, count, np.zeros(count, np.int64))
        rows, notes = verified(rule, pair, rng, drawn)
        return cells(rows.text, pair.new.vocabulary), notes

    return sampler


def follow_twice(rule: Rule) -> Sampler:
    """The rule is applied once more to what it has verified, under a third policy."""

    def sampler(pair: PolicyPair, rng: np.random.Generator, count: int) -> Outcome:
        between = mixture(pair.old, pair.new, 0.5)
        drawn = draw_rows(pair.old, rng, pair.top_k, count, np.zeros(count, np.int64))
        rows, first = verified(rule, replace(pair, new=between), rng, drawn)
        rows, second = verified(rule, replace(pair, old=between), rng, rows)
        notes = {key: first[key] + second[key] for key in first}
        return cells(rows.text, pair.new.vocabulary), notes

    return sampler


def verified(
    rule: Rule, pair: PolicyPair, rng: np.random.Generator, drawn: DrawnRows
) -> tuple[DrawnRows, dict[str, float]]:
    """Cut samples of the old policy, apply the rule, and complete them with the new policy."""
    kept = cut_samples(pair, rng, drawn)
    judged = rule(pair, kept, rng)
    text, noise = drawn.text.copy(), drawn.noise.copy()
    placed = np.flatnonzero(judged.token >= 0)
    text[placed, judged.accepted[placed]] = judged.token[placed]
    if judged.noise is not None:
        noise[placed, judged.accepted[placed]] = judged.noise[placed]
    done = judged.accepted + (judged.token >= 0)
    rows = draw_rows(pair.new, rng, pair.top_k, DrawnRows(text, drawn.lists, noise), done)
    return rows, {"accepted": float(judged.accepted.sum()), "drafted": float(kept.lengths.sum())}


def verify(*, block: bool) -> Rule:
    """`verify_kept`, with lists of the K most probable tokens."""

    def rule(_pair: PolicyPair, kept: CutSamples, rng: np.random.Generator) -> Judged:
        names = kept.names()
        return place(kept, rng, names, kept.judge(rng, names, block=block))

    return rule


def place(kept: CutSamples, rng: np.random.Generator, names: Codes, verdicts: Verdicts) -> Judged:
    """The tokens of verdicts: a listed one, one of the row's own tail tokens, or a fresh one."""
    accepted = verdicts.accepted.astype(np.int64)
    token = np.full(len(accepted), -1)
    placed = np.flatnonzero(verdicts.symbol >= 0)
    at, symbol = kept.offsets[placed] + accepted[placed], verdicts.symbol[placed]
    lists, k = kept.lists[at], kept.lists.shape[1]
    fresh = rng.exponential(size=(len(accepted), kept.noise.shape[1]))
    renamed = verdicts.renamed[placed]
    fresh[placed[renamed]] = kept.noise[at[renamed]]
    listed = np.take_along_axis(lists, symbol.clip(max=k - 1)[:, None], 1)[:, 0]
    token[placed] = np.where(symbol < k, listed, name(kept.new[at], lists, fresh[placed]))
    token[placed[renamed]] = names[at[renamed]]
    return Judged(accepted, token, fresh)


def specrl(lenience: float) -> Rule:
    """SPEC-RL's published rule; it knows q and p of the drawn token, also outside the top-K."""

    def rule(_pair: PolicyPair, kept: CutSamples, rng: np.random.Generator) -> Judged:
        at = (np.arange(len(kept.tokens)), kept.tokens)
        with np.errstate(divide="ignore"):
            drawn, current = np.log(kept.old[at]), np.log(kept.new[at])
        numbers = rng.random(len(kept.tokens))
        accepted = accept_lenient(drawn, current, kept.offsets, numbers, lenience).astype(np.int64)
        return Judged(accepted, np.full_like(accepted, -1))

    return rule


PURE: dict[str, tuple[Sampler, bool]] = {
    "plain": (plain, True),
    "chain": (chain, True),
    "tree": (tree, True),
    "verify-token": (follow(verify(block=False)), True),
    "verify-block": (follow(verify(block=True)), True),
    "verify-twice": (follow_twice(verify(block=True)), True),
    "specrl-1": (follow(specrl(1.0)), False),
    "specrl-e0.5": (follow(specrl(math.exp(0.5))), False),
}
"""Sampler of each mode, and whether it is exact."""
