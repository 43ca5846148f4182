"""Drafting: find where a row's recent tokens were seen before, and let those places vote.

    candidates    positions whose past equals the row's; the token behind each is its vote
    vote          weighted by recency and, where no match is long, by the length of the match
    follow        take the winner, keep the candidates that agree, ask them again

When all candidates have run dry (a sibling that is only a few tokens ahead), the search starts
again from the row's tokens and the draft so far.
"""

from __future__ import annotations

import numpy as np

from cache.jit import kernel
from cache.store import (
    BASE,
    BLOCK,
    LOG2,
    MASK,
    NEWEST,
    ORDINAL,
    OWN,
    RING_AT,
    ROOT,
    SEQUENCE,
    SPAN,
    TREE,
    LongArray,
    after,
    before,
    bucket,
)
from cache.trajectory import FloatArray, IntArray

VISITS = 4
"""Places looked at for each candidate wanted: bounds the time in a tree full of repetitions."""
SHORTER = np.float32(0.25)
"""Weight of a candidate for each token that its match is shorter than the longest."""


@kernel
def hash_of(tokens: IntArray, stop: int, length: int) -> int:
    """Hash of tokens[stop - length : stop]."""
    hashed = 0
    for index in range(stop - length, stop):
        hashed = (hashed * BASE + 1 + int(tokens[index])) & MASK
    return hashed


@kernel
def agreement(arena: IntArray, position: int, tokens: IntArray, stop: int, longest: int) -> int:
    """How many tokens up to `position` equal those before tokens[stop], at most `longest`."""
    for length in range(longest):
        if arena[position] != tokens[stop - 1 - length]:
            return length
        if length + 1 < longest:
            position = before(arena, position)
    return longest


@kernel
def collect(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    own: int,
    past: IntArray,
    stop: int,
    min_match: int,
    max_match: int,
    fading: FloatArray,
    places: LongArray,
    lengths: LongArray,
    weights: FloatArray,
) -> tuple[int, int]:
    """Fill `places` and `weights` with candidates; returns their number and the longest match.

    Places of the row's own sequence count only when nobody else has one, and only for a long
    match: a row that repeats itself.
    """
    root = trees[tree, ROOT]
    if root == 0:
        return 0, 0
    echo = 0
    for order in (1, 0):
        shortest = max_match if order == 1 else min_match
        hashed = hash_of(past, stop, shortest)
        position = int(arena[bucket(arena, root, trees[tree, LOG2], hashed, order)])
        count = 0
        longest = 0
        visits = VISITS * len(places)
        while position and visits and count < len(places):
            visits -= 1
            length = agreement(arena, position, past, stop, max_match)
            if length >= shortest and after(arena, position):
                block = position & -BLOCK
                if arena[block + SEQUENCE] != own:
                    age = trees[tree, NEWEST] - arena[block + ORDINAL]
                    places[count] = position
                    lengths[count] = length
                    weights[count] = fading[min(age, len(fading) - 1)]
                    longest = max(longest, length)
                    count += 1
                elif order == 1 and echo == 0:
                    echo = position
            position = int(arena[position + (order + 1) * SPAN])
        if count:
            for item in range(count):
                weights[item] *= SHORTER ** (longest - lengths[item])
            return count, longest
    if echo:
        places[0] = echo
        weights[0] = 0.5
        return 1, max_match
    return 0, 0


@kernel
def step(
    arena: IntArray, places: LongArray, weights: FloatArray, count: int
) -> tuple[int, int, float, float]:
    """Move all candidates one token on, keep those of the winning token.

    Returns:
        the number kept, the token, its weight, the weight of all votes. 0 kept: all have run dry.
    """
    alive = 0
    total = 0.0
    for item in range(count):
        follower = after(arena, places[item])
        if follower:
            places[alive] = follower
            weights[alive] = weights[item]
            total += weights[item]
            alive += 1
    best = -1
    best_weight = 0.0
    for item in range(alive):
        # Once the rest cannot win any more, it need not be counted.
        token = arena[places[item]]
        if token == best or 2.0 * best_weight > total:
            continue
        weight = 0.0
        for other in range(item, alive):
            if arena[places[other]] == token:
                weight += weights[other]
        if weight > best_weight:
            best_weight = weight
            best = token
    kept = 0
    for item in range(alive):
        if arena[places[item]] == best:
            places[kept] = places[item]
            weights[kept] = weights[item]
            kept += 1
    return kept, best, best_weight, total


@kernel
def draft_row(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    own: int,
    past: IntArray,
    budget: int,
    min_match: int,
    max_match: int,
    min_probability: float,
    doubt: float,
    fading: FloatArray,
    places: LongArray,
    lengths: LongArray,
    weights: FloatArray,
    tokens: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft up to `budget` tokens behind past[:max_match] into `tokens`; returns how many."""
    drafted = 0
    path = 1.0
    while drafted < budget:
        count, matched = collect(
            arena, trees, tree, own, past, max_match + drafted, min_match, max_match,
            fading, places, lengths, weights,
        )  # fmt: skip
        if count == 0:
            break
        while drafted < budget:
            count, token, weight, total = step(arena, places, weights, count)
            if count == 0:
                break
            # A short match is doubted more: its places may have nothing to do with this one.
            probability = weight / (total + doubt * max_match / matched)
            path *= probability
            if path < min_probability:
                return drafted
            tokens[drafted] = token
            probabilities[drafted] = path
            past[max_match + drafted] = token
            drafted += 1
            matched = min(matched + 1, max_match)
    return drafted


@kernel
def draft(
    arena: IntArray,
    trees: LongArray,
    cursors: LongArray,
    rings: IntArray,
    rows: IntArray,
    budgets: IntArray,
    min_match: int,
    min_probability: float,
    doubt: float,
    fading: FloatArray,
    max_candidates: int,
    longest: int,
    offsets: IntArray,
    tokens: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft for rows; fills `offsets` `[B+1]` and the front of the others; returns the total."""
    max_match = rings.shape[1]
    past = np.empty(max_match + longest, np.int32)
    places = np.empty(max_candidates, np.int64)
    lengths = np.empty(max_candidates, np.int64)
    weights = np.empty(max_candidates, np.float32)
    total = 0
    offsets[0] = 0
    for item in range(len(rows)):
        row = rows[item]
        tree = cursors[row, TREE]
        if tree >= 0 and budgets[item] > 0:
            at = cursors[row, RING_AT]
            past[: max_match - at] = rings[row, at:]
            past[max_match - at : max_match] = rings[row, :at]
            total += draft_row(
                arena, trees, tree, cursors[row, OWN], past, min(budgets[item], longest),
                min_match, max_match, min_probability, doubt, fading, places, lengths, weights,
                tokens[total:], probabilities[total:],
            )  # fmt: skip
        offsets[item + 1] = total
    return total
