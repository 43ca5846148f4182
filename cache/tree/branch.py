"""Drafting token trees: the most probable path grows first.

Every token with a vote is a branch.

A *guess* is a token with the candidates that vote for it, a range of one array. Grouping the
candidates of a guess by their next token, in place, gives the guesses that follow it. The nodes of
the draft are the guesses that have *grown*; the next to grow is always the one with the highest
path probability. This gives the best tree of its size. A node is accepted when all tokens up to it
are drawn, and siblings are different tokens, so the expected number of accepted tokens is the sum
of path probabilities; and no path probability exceeds its parent's, so the greedy choice is optimal
(arXiv 2406.16858, 2406.17276).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncrl.cache.tree.arena import LongArray
from asyncrl.cache.tree.estimate import Experience, base_of, corrected, kind_of
from asyncrl.cache.tree.match import Candidates, RowState, Rules, Search, collect, move_on
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

kernel = kernels_of("cache/tree")

BLEND = 0.1
"""Votes that all candidates with a shorter match share when few have a long one: alternatives."""


class Guesses(NamedTuple):
    """Working space for one row: K guesses in the order in which they were made, K candidates."""

    tokens: IntArray
    """`[K]`"""
    parents: IntArray
    """`[K]` the guess before it, -1 for the row's last token."""
    nodes: IntArray
    """`[K]` its index in the draft, once it has grown."""
    starts: IntArray
    """`[K]` its candidates are positions[starts[k] : stops[k]]."""
    stops: IntArray
    """`[K]`"""
    matches: IntArray
    """`[K]` length of the longest match among them."""
    paths: FloatArray
    """`[K]` path probability."""
    queue: IntArray
    """`[max_draft_tokens]` guesses that may grow, likeliest last."""
    candidates: Candidates


@kernel
def working_space(rules: Rules) -> Guesses:
    """Space for every guess that a budget can lead to: each node's candidates vote once."""
    size = (rules.max_draft_tokens + 1) * rules.max_candidates
    return Guesses(
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.float32),
        np.empty(rules.max_draft_tokens, np.int32),
        Candidates(np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.float32)),
    )


@kernel
def group(
    arena: IntArray, positions: LongArray, weights: FloatArray, start: int, stop: int
) -> tuple[int, float]:
    """Move positions with the first one's token to the front; returns their stop and weight."""
    token = arena[positions[start]]
    weight = float(weights[start])
    end = start + 1
    for item in range(start + 1, stop):
        if arena[positions[item]] == token:
            weight += weights[item]
            positions[item], positions[end] = positions[end], positions[item]
            weights[item], weights[end] = weights[end], weights[item]
            end += 1
    return end, weight


@kernel
def enqueue(queue: IntArray, size: int, room: int, paths: FloatArray, guess: int) -> int:
    """Insert a guess in order and keep only the best `room`; returns the new size."""
    path = paths[guess]
    if size < room:
        at = size
        while at > 0 and paths[queue[at - 1]] > path:
            queue[at] = queue[at - 1]
            at -= 1
        queue[at] = guess
        return size + 1
    if size and paths[queue[0]] < path:
        at = 0
        while at + 1 < size and paths[queue[at + 1]] < path:
            queue[at] = queue[at + 1]
            at += 1
        queue[at] = guess
    return size


@kernel
def trail(past: IntArray, guesses: Guesses, guess: int, out: IntArray) -> None:
    """Write the last tokens up to a guess to `out` `[max_match]`."""
    at = len(out) - 1
    while guess >= 0 and at >= 0:
        out[at] = guesses.tokens[guess]
        guess = guesses.parents[guess]
        at -= 1
    behind = len(out) - 1
    while at >= 0:
        out[at] = past[behind]
        at -= 1
        behind -= 1


@kernel
def depth_of_guess(guesses: Guesses, guess: int) -> int:
    """Length of the path that ends with a guess; 0 for -1, the row's last token."""
    depth = 0
    while guess >= 0:
        depth += 1
        guess = guesses.parents[guess]
    return depth


@kernel
def fork(
    search: Search,
    row: RowState,
    experience: Experience,
    guesses: Guesses,
    made: int,
    parent: int,
    start: int,
    stop: int,
    total: float,
    united: bool,
    matched: int,
) -> int:
    """Make the guesses that follow guess `parent` (-1: the row's last token).

    Their candidates are positions[start:stop], already moved to their next token: `total` is the
    weight of all votes, `united` tells whether all are for one token, and `matched` is the length
    of the longest match. `made` guesses exist so far.

    Returns:
        the new number of guesses.
    """
    positions = guesses.candidates.positions
    max_match = search.rules.max_match
    first = made
    certain = 0.0
    width = experience.tokens.shape[1]
    while start < stop:
        end, weight = stop, total
        if not united:
            end, weight = group(search.arena, positions, guesses.candidates.weights, start, stop)
        token = search.arena[positions[start]]
        base = base_of(weight, total, experience.doubts[matched])
        kind = kind_of(weight, total, matched, max_match)
        probability = corrected(base, experience.odds[kind])
        guesses.tokens[made] = token
        guesses.parents[made] = parent
        guesses.starts[made] = start
        guesses.stops[made] = end
        guesses.matches[made] = matched + 1 if matched < max_match else matched
        guesses.paths[made] = probability
        certain += probability
        if made < width:
            experience.tokens[row.row, made] = token
            experience.parents[row.row, made] = parent
            experience.bases[row.row, made] = base
            experience.kinds[row.row, made] = kind
            experience.waiting[row.row] = made + 1
        made += 1
        start = end
    # Corrected one by one, the probabilities of siblings may add up to more than 1.
    scale = (guesses.paths[parent] if parent >= 0 else 1.0) / max(certain, 1.0)
    for guess in range(first, made):
        guesses.paths[guess] *= scale
    return made


@kernel
def draft_tree(
    search: Search,
    row: RowState,
    budget: int,
    min_probability: float,
    experience: Experience,
    past: IntArray,
    recent: IntArray,
    guesses: Guesses,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft up to `budget` nodes after past[:max_match]; returns how many.

    `recent` `[max_match]` is working space.
    """
    positions = guesses.candidates.positions
    lengths = guesses.candidates.lengths
    weights = guesses.candidates.weights
    drafted = made = waiting = top = 0
    parent = -1
    start = stop = matched = 0
    while True:
        stop, total, united = move_on(search.arena, positions, weights, start, stop)
        if start == stop:
            trail(past, guesses, parent, recent)
            depth = depth_of_guess(guesses, parent)
            room = slice(top, top + search.rules.max_candidates)
            free = Candidates(positions[room], lengths[room], weights[room])
            count, matched = collect(search, row, depth, recent, len(recent), BLEND, free)
            start = top
            top += count
            stop, total, united = move_on(search.arena, positions, weights, start, top)
        first = made
        made = fork(
            search, row, experience, guesses, made, parent, start, stop, total, united, matched
        )
        for guess in range(first, made):
            if guesses.paths[guess] >= min_probability:
                waiting = enqueue(guesses.queue, waiting, budget - drafted, guesses.paths, guess)
        if waiting == 0:
            return drafted
        waiting -= 1
        parent = guesses.queue[waiting]
        above = guesses.parents[parent]
        tokens[drafted] = guesses.tokens[parent]
        parents[drafted] = guesses.nodes[above] if above >= 0 else -1
        probabilities[drafted] = guesses.paths[parent]
        guesses.nodes[parent] = drafted
        drafted += 1
        if drafted == budget:
            return drafted
        start, stop, matched = (
            guesses.starts[parent],
            guesses.stops[parent],
            guesses.matches[parent],
        )
