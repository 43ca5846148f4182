"""The acceptance rules alone, on an enumerated model: as fast as they are, and without an engine.

The drafts, or the kept tokens, come from an older policy; every sample has its own. Where a rule
needs the kept tokens' distributions it gets what an engine has: the K = 2 most probable of four.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.exactness.model import (
    Codes,
    Doubles,
    Policy,
    cells,
    draw,
    listed,
    mixture,
    random_policy,
    tail_draws,
)
from rollout.acceptance import accept_chain, accept_lenient, accept_tree, verify_kept

VOCABULARY, LENGTH, TOP_K, TREE_NODES = 4, 4, 2, 6


@dataclass(frozen=True)
class World:
    """Two policies: the one that wrote drafts and kept tokens, and the one to follow."""

    old: Policy
    new: Policy
    top_k: int = TOP_K


Outcome = tuple[Codes, dict[str, float]]
"""`[n]` cells, and what else is worth telling: sums over the samples."""
Sampler = Callable[[World, np.random.Generator, int], Outcome]


def default_world(drift: float = 0.3, top_p: float = 0.95) -> World:
    """Four tokens, four long; at top-p 0.95 some sequences are impossible, others only under q."""
    old = random_policy(1, VOCABULARY, LENGTH)
    other = random_policy(2, VOCABULARY, LENGTH)
    return World(mixture(old, old, 0.0, top_p), mixture(old, other, drift, top_p))


def plain(world: World, rng: np.random.Generator, count: int) -> Outcome:
    """No drafts: what the statistics say of a sampler that cannot be wrong."""
    return cells(world.new.sample(rng, count), world.new.vocabulary), {}


def chain(world: World, rng: np.random.Generator, count: int) -> Outcome:
    """Chains that the old policy continues, of any length, again after each rejection."""
    length = world.new.length
    text, done = np.zeros((count, length), np.int64), np.zeros(count, np.int64)
    accepted = drafted = 0
    while (rows := np.flatnonzero(done < length)).size:
        at = done[rows]
        wanted = world.old.finish(rng, text[rows], at)
        laws = world.new.along(wanted)
        draws = draw(rng, laws.reshape(-1, laws.shape[2])).reshape(wanted.shape)
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
    return cells(text, world.new.vocabulary), {"accepted": accepted, "drafted": drafted}


def tree(world: World, rng: np.random.Generator, count: int) -> Outcome:
    """Random trees of up to six nodes; what each holds the old policy drew."""
    length, vocabulary = world.new.length, world.new.vocabulary
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
            tokens[:, node] = draw(rng, world.old.at(above, before))
            depth[:, node + 1] = np.minimum(above + 1, length - 1)
            codes[:, node + 1] = before * vocabulary + tokens[:, node]
        counts = rng.integers(0, TREE_NODES + 1, n)
        counts[done[rows] == length - 1] = 0
        used = np.arange(TREE_NODES + 1) <= counts[:, None]
        samples = draw(rng, world.new.at(depth[used], codes[used]))
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
class Kept:
    """Kept tokens of n samples, flat: m tokens in all, each row cut at a random place."""

    text: Codes
    """`[n, L]` what the old policy wrote; a row's first `lengths` tokens are kept."""
    lengths: Codes
    tokens: Codes
    """`[m]`"""
    offsets: Codes
    """`[n+1]`"""
    old: Doubles
    """`[m, V]`"""
    new: Doubles


def keep(world: World, rng: np.random.Generator, count: int) -> Kept:
    """Draw from the old policy, cut anywhere (a weight update comes when it likes)."""
    text = world.old.sample(rng, count)
    lengths = rng.integers(0, world.old.length + 1, count)
    cut = np.arange(text.shape[1]) < lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    old, new = world.old.along(text)[cut], world.new.along(text)[cut]
    return Kept(text, lengths, text[cut], offsets, old, new)


Rule = Callable[[World, Kept, np.random.Generator], tuple[Codes, Codes]]
"""Gives `[n]` tokens accepted and `[n]` the token placed after them, -1: none."""


def follow(rule: Rule) -> Sampler:
    """A sampler that judges kept tokens by a rule; then the new policy draws on."""

    def sampler(world: World, rng: np.random.Generator, count: int) -> Outcome:
        kept = keep(world, rng, count)
        accepted, token = rule(world, kept, rng)
        text, placed = kept.text.copy(), np.flatnonzero(token >= 0)
        text[placed, accepted[placed]] = token[placed]
        text = world.new.finish(rng, text, accepted + (token >= 0))
        notes = {"accepted": float(accepted.sum()), "drafted": float(kept.lengths.sum())}
        return cells(text, world.new.vocabulary), notes

    return sampler


def verify(*, block: bool) -> Rule:
    """`verify_kept`, with lists of the K most probable."""

    def rule(world: World, kept: Kept, rng: np.random.Generator) -> tuple[Codes, Codes]:
        now = listed(kept.tokens, kept.new, world.top_k)
        tail_ids, tail_logprobs = tail_draws(rng, kept.new, now.topk_ids)
        verdicts = verify_kept(
            kept.tokens,
            listed(kept.tokens, kept.old, world.top_k),
            now,
            tail_ids=tail_ids,
            tail_logprobs=tail_logprobs,
            offsets=kept.offsets,
            uniforms=rng.random((len(kept.tokens), 2)),
            block=block,
        )
        return verdicts.accepted.astype(np.int64), verdicts.token.astype(np.int64)

    return rule


def specrl(lenience: float) -> Rule:
    """SPEC-RL's published rule; it knows q and p of the drawn token, whatever the top-K."""

    def rule(world: World, kept: Kept, rng: np.random.Generator) -> tuple[Codes, Codes]:  # noqa: ARG001
        at = (np.arange(len(kept.tokens)), kept.tokens)
        with np.errstate(divide="ignore"):
            drawn, now = np.log(kept.old[at]), np.log(kept.new[at])
        numbers = rng.random(len(kept.tokens))
        accepted = accept_lenient(drawn, now, kept.offsets, numbers, lenience).astype(np.int64)
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
