"""Drafting token trees: every voted token is a branch, the likeliest path grows first.

A *guess* is a token with the places that vote for it, a range of `places`: grouping the places of
one guess by their next token, in place, gives the guesses behind it. Grown guesses are the nodes
of the draft. The next to grow is always the one with the highest path probability. That is the
best tree of its size: a node is passed when all tokens up to it are drawn, siblings are different
tokens, so the expected number of accepted tokens is the sum of path probabilities, and no path
probability exceeds its parent's (the rule of the greedy choice: arXiv 2406.16858, 2406.17276).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cache.estimate import Experience, base_of, corrected, kind_of
from cache.jit import kernel
from cache.match import Rules, collect, move_on, past_of, whereabouts
from cache.store import END, OWN, RING_AT, TREE, LongArray
from rollout.trajectory import FloatArray, IntArray

BLEND = 0.1
"""Votes of all places with a shorter match, where few have a long one: other ways to go on."""


class Guesses(NamedTuple):
    """Working space of one row: guesses in the order in which they were made."""

    tokens: IntArray
    """`[K]`"""
    parents: IntArray
    """`[K]` the guess before it, -1 for the row's last token."""
    nodes: IntArray
    """`[K]` its number in the draft, once it has grown."""
    starts: IntArray
    """`[K]` its places are places[starts[k] : stops[k]]."""
    stops: IntArray
    """`[K]`"""
    matches: IntArray
    """`[K]` length of the longest match among them."""
    paths: FloatArray
    """`[K]` path probability."""
    queue: IntArray
    """`[longest]` guesses that may grow, likeliest last."""
    places: LongArray
    """`[K]`"""
    lengths: IntArray
    """`[K]`"""
    weights: FloatArray
    """`[K]`"""


@kernel
def working_space(rules: Rules) -> Guesses:
    """Room for every guess that a row's budget can lead to: each node's places vote once."""
    size = (rules.longest + 1) * rules.max_candidates
    return Guesses(
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.float32),
        np.empty(rules.longest, np.int32),
        np.empty(size, np.int64),
        np.empty(size, np.int32),
        np.empty(size, np.float32),
    )


@kernel
def group(
    arena: IntArray, places: LongArray, weights: FloatArray, start: int, stop: int
) -> tuple[int, float]:
    """Bring the places with the first one's token to the front; returns their end, their votes."""
    token = arena[places[start]]
    weight = float(weights[start])
    end = start + 1
    for item in range(start + 1, stop):
        if arena[places[item]] == token:
            weight += weights[item]
            places[item], places[end] = places[end], places[item]
            weights[item], weights[end] = weights[end], weights[item]
            end += 1
    return end, weight


@kernel
def enqueue(queue: IntArray, size: int, room: int, paths: FloatArray, guess: int) -> int:
    """Insert a guess in order; only the best `room` are kept. Returns the new size."""
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
def depth_under(guesses: Guesses, guess: int) -> int:
    """How many drafted tokens a path has that ends with a guess; 0 for none."""
    depth = 0
    while guess >= 0:
        depth += 1
        guess = guesses.parents[guess]
    return depth


@kernel
def fork(
    arena: IntArray,
    guesses: Guesses,
    made: int,
    parent: int,
    start: int,
    stop: int,
    total: float,
    united: bool,
    matched: int,
    row: int,
    rules: Rules,
    experience: Experience,
) -> int:
    """Make the guesses behind a guess from its places; returns the new number of guesses."""
    first = made
    certain = 0.0
    width = experience.tokens.shape[1]
    while start < stop:
        end, weight = stop, total
        if not united:
            end, weight = group(arena, guesses.places, guesses.weights, start, stop)
        token = arena[guesses.places[start]]
        base = base_of(weight, total, experience.doubts[matched])
        kind = kind_of(weight, total, matched, rules.max_match)
        probability = corrected(base, experience.odds[kind])
        guesses.tokens[made] = token
        guesses.parents[made] = parent
        guesses.starts[made] = start
        guesses.stops[made] = end
        guesses.matches[made] = matched + 1 if matched < rules.max_match else matched
        guesses.paths[made] = probability
        certain += probability
        if made < width:
            experience.tokens[row, made] = token
            experience.parents[row, made] = parent
            experience.bases[row, made] = base
            experience.kinds[row, made] = kind
            experience.waiting[row] = made + 1
        made += 1
        start = end
    # Corrected one by one, siblings may seem to be more than everything.
    scale = (guesses.paths[parent] if parent >= 0 else 1.0) / max(certain, 1.0)
    for guess in range(first, made):
        guesses.paths[guess] *= scale
    return made


@kernel
def draft_row(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    own: int,
    expected: int,
    row: int,
    past: IntArray,
    budget: int,
    least: float,
    rules: Rules,
    writer: int,
    experience: Experience,
    guesses: Guesses,
    recent: IntArray,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft up to `budget` nodes behind past[:max_match]; returns how many."""
    drafted = made = waiting = top = 0
    parent = -1
    start = stop = matched = 0
    while True:
        stop, total, united = move_on(arena, guesses.places, guesses.weights, start, stop)
        if start == stop:
            trail(past, guesses, parent, recent)
            depth = depth_under(guesses, parent)
            room = slice(top, top + rules.max_candidates)
            count, matched = collect(
                arena, trees, tree, own, expected + depth, recent, rules.max_match,
                rules, writer, BLEND,
                guesses.places[room], guesses.lengths[room], guesses.weights[room],
            )  # fmt: skip
            start = top
            top += count
            stop, total, united = move_on(arena, guesses.places, guesses.weights, start, top)
        first = made
        made = fork(
            arena, guesses, made, parent, start, stop, total, united, matched, row, rules,
            experience,
        )  # fmt: skip
        for guess in range(first, made):
            if guesses.paths[guess] >= least:
                waiting = enqueue(guesses.queue, waiting, budget - drafted, guesses.paths, guess)
        if waiting == 0:
            return drafted
        waiting -= 1
        parent = guesses.queue[waiting]
        before = guesses.parents[parent]
        tokens[drafted] = guesses.tokens[parent]
        parents[drafted] = guesses.nodes[before] if before >= 0 else -1
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


@kernel
def draft(
    arena: IntArray,
    trees: LongArray,
    cursors: LongArray,
    rings: IntArray,
    rows: IntArray,
    budgets: IntArray,
    least: float,
    rules: Rules,
    writer: int,
    experience: Experience,
    offsets: IntArray,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft trees for rows; arguments and result as of `cache.match.draft`."""
    past = np.empty(rules.max_match, np.int32)
    recent = np.empty(rules.max_match, np.int32)
    guesses = working_space(rules)
    total = 0
    offsets[0] = 0
    for item in range(len(rows)):
        row = rows[item]
        tree = cursors[row, TREE]
        experience.waiting[row] = 0
        if tree >= 0 and budgets[item] > 0:
            past_of(rings[row], cursors[row, RING_AT], past)
            total += draft_row(
                arena, trees, tree, cursors[row, OWN],
                whereabouts(arena, cursors[row, OWN], cursors[row, END]), row, past,
                min(budgets[item], rules.longest), least, rules, writer, experience,
                guesses, recent, tokens[total:], parents[total:], probabilities[total:],
            )  # fmt: skip
        offsets[item + 1] = total
    return total
