"""Modes that run the acceptance rules alone, on an enumerated model and without an engine.

The drafts, or the kept tokens, come from an older policy, independently for every sample. A rule
that needs the distributions of the kept tokens gets what an engine has: the K = 2 most probable of
four tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.exactness.model import (
    Codes,
    Doubles,
    TabularPolicy,
    cells,
    draw,
    mixture,
    random_policy,
    tail_draws,
    top_k_of,
)
from rollout.acceptance import accept_chain, accept_lenient, accept_tree, verify_kept

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
class CutSamples:
    """n samples of the old policy, each cut at a random place: m kept tokens in all."""

    text: Codes
    """`[n, L]` the whole samples; the first lengths[i] tokens of row i are kept."""
    lengths: Codes
    """`[n]`"""
    tokens: Codes
    """`[m]` the kept tokens, row after row."""
    offsets: Codes
    """`[n+1]` row i's are tokens[offsets[i] : offsets[i+1]]."""
    old: Doubles
    """`[m, V]` the old policy's distribution at each kept token."""
    new: Doubles
    """`[m, V]` the new policy's."""


def cut_samples(pair: PolicyPair, rng: np.random.Generator, count: int) -> CutSamples:
    """Draw from the old policy and cut at random, as a weight update does."""
    text = pair.old.sample(rng, count)
    lengths = rng.integers(0, pair.old.length + 1, count)
    cut = np.arange(text.shape[1]) < lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    old, new = pair.old.along(text)[cut], pair.new.along(text)[cut]
    return CutSamples(text, lengths, text[cut], offsets, old, new)


Rule = Callable[[PolicyPair, CutSamples, np.random.Generator], tuple[Codes, Codes]]
"""Returns `[n]` tokens accepted and `[n]` the token placed after them, -1 for none."""


def follow(rule: Rule) -> Sampler:
    """A sampler that applies a rule to kept tokens and completes them with the new policy."""

    def sampler(pair: PolicyPair, rng: np.random.Generator, count: int) -> Outcome:
        kept = cut_samples(pair, rng, count)
        accepted, token = rule(pair, kept, rng)
        text, placed = kept.text.copy(), np.flatnonzero(token >= 0)
        text[placed, accepted[placed]] = token[placed]
        text = pair.new.complete(rng, text, accepted + (token >= 0))
        notes = {"accepted": float(accepted.sum()), "drafted": float(kept.lengths.sum())}
        return cells(text, pair.new.vocabulary), notes

    return sampler


def verify(*, block: bool) -> Rule:
    """`verify_kept`, with lists of the K most probable tokens."""

    def rule(pair: PolicyPair, kept: CutSamples, rng: np.random.Generator) -> tuple[Codes, Codes]:
        current = top_k_of(kept.tokens, kept.new, pair.top_k)
        tail_ids, tail_logprobs = tail_draws(rng, kept.new, current.topk_ids)
        verdicts = verify_kept(
            kept.tokens,
            top_k_of(kept.tokens, kept.old, pair.top_k),
            current,
            tail_ids=tail_ids,
            tail_logprobs=tail_logprobs,
            offsets=kept.offsets,
            uniforms=rng.random((len(kept.tokens), 2)),
            block=block,
        )
        return verdicts.accepted.astype(np.int64), verdicts.token.astype(np.int64)

    return rule


def specrl(lenience: float) -> Rule:
    """SPEC-RL's published rule; it knows q and p of the drawn token, also outside the top-K."""

    def rule(pair: PolicyPair, kept: CutSamples, rng: np.random.Generator) -> tuple[Codes, Codes]:  # noqa: ARG001
        at = (np.arange(len(kept.tokens)), kept.tokens)
        with np.errstate(divide="ignore"):
            drawn, current = np.log(kept.old[at]), np.log(kept.new[at])
        numbers = rng.random(len(kept.tokens))
        accepted = accept_lenient(drawn, current, kept.offsets, numbers, lenience).astype(np.int64)
        return accepted, np.full_like(accepted, -1)

    return rule


PURE: dict[str, tuple[Sampler, bool]] = {
    "plain": (plain, True),
    "chain": (chain, True),
    "tree": (tree, True),
    "verify-token": (follow(verify(block=False)), True),
    "verify-block": (follow(verify(block=True)), True),
    "specrl-1": (follow(specrl(1.0)), False),
    "specrl-e0.5": (follow(specrl(math.exp(0.5))), False),
}
"""Sampler of each mode, and whether it is exact."""
