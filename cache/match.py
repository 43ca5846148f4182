"""Drafting: find where a row's recent tokens were seen before, and let those places vote.

    candidates    positions whose past equals the row's; the token behind each is its vote
    vote          fading with policy versions, with the distance from the row's own place in its
                  response and, where no match is long, with what it lacks
    follow        take the winner, keep the candidates that agree, ask them again

When all candidates have run dry (a sibling that is only a few tokens ahead), the search starts
again from the row's tokens and the draft so far. `cache.branch` follows several at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cache.estimate import Experience, base_of, corrected, kind_of
from cache.jit import kernel
from cache.store import (
    BASE,
    BLOCK,
    END,
    LOG2,
    MASK,
    OWN,
    RING_AT,
    ROOT,
    SEQUENCE,
    SPAN,
    TREE,
    VERSION,
    LongArray,
    after,
    before,
    bucket,
    index_of,
)
from rollout.trajectory import FloatArray, IntArray

VISITS = 4
"""Places looked at for each candidate wanted: bounds the time in a tree full of repetitions."""
SHORTER = np.float32(0.25)
"""Weight of a candidate for each token that its match is shorter than the longest."""


class Rules(NamedTuple):
    """Settings of the cache, as compiled code takes them."""

    min_match: int
    max_match: int
    max_candidates: int
    longest: int
    """Most tokens drafted for a row."""
    fading: FloatArray
    """Weight of a vote by the policy versions since it was written; the last for all older."""


FAINTEST = 1 / 16
"""Least weight of an old vote: where nothing newer is known it is still the best guess."""


def fading(half_life: float) -> FloatArray:
    """Weights of votes by the policy versions since they were written."""
    versions = np.arange(min(int(4 * half_life) + 2, 1 << 16))
    weights: FloatArray = np.maximum(np.exp2(-versions / half_life), FAINTEST).astype(np.float32)
    return weights


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
def faded(version: int, writer: int, fading: FloatArray) -> float:
    """Weight of a vote that `version` wrote, now that `writer` writes."""
    return float(fading[min(abs(writer - version), len(fading) - 1)])


FAR = 0.1
"""Least weight of a place far from the row's own: rows that shifted must find their way back."""
UNKNOWN = -(1 << 30)
"""Index of a row whose tokens are not stored: all places count alike."""


@kernel
def nearness(arena: IntArray, position: int, expected: int) -> float:
    """Weight of a place by its distance from the `expected` index in its response."""
    if expected < UNKNOWN // 2:
        return 1.0
    return max(FAR, 1.0 / (1.0 + abs(index_of(arena, position) - expected)))


@kernel
def whereabouts(arena: IntArray, own: int, end: int) -> int:
    """Index of a row's last token in its response."""
    if own > 0:
        return index_of(arena, end)
    return -1 if own == 0 else UNKNOWN


@kernel
def walk(
    arena: IntArray,
    position: int,
    order: int,
    shortest: int,
    below: int,
    own: int,
    expected: int,
    past: IntArray,
    stop: int,
    rules: Rules,
    writer: int,
    places: LongArray,
    lengths: IntArray,
    weights: FloatArray,
    count: int,
) -> tuple[int, int, int]:
    """Add the places of a chain whose match is at least `shortest` and below `below` tokens long.

    Returns:
        their new number, the longest match among those added, the newest place of the row's own.
    """
    longest = 0
    echo = 0
    visits = VISITS * len(places)
    while position and visits and count < len(places):
        visits -= 1
        length = agreement(arena, position, past, stop, rules.max_match)
        if shortest <= length < below and after(arena, position):
            block = position & -BLOCK
            if arena[block + SEQUENCE] != own:
                places[count] = position
                lengths[count] = length
                weight = faded(arena[block + VERSION], writer, rules.fading)
                weights[count] = weight * nearness(arena, position, expected)
                longest = max(longest, length)
                count += 1
            elif echo == 0:
                echo = position
        position = int(arena[position + (order + 1) * SPAN])
    return count, longest, echo


@kernel
def collect(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    own: int,
    expected: int,
    past: IntArray,
    stop: int,
    rules: Rules,
    writer: int,
    blend: float,
    places: LongArray,
    lengths: IntArray,
    weights: FloatArray,
) -> tuple[int, int]:
    """Fill `places` and `weights` with candidates; returns their number and the longest match.

    Places of the row's own sequence count only when nobody else has one, and only for a long
    match: a row that repeats itself. The match is then said to be max_match + 1 long.

    Beside a few places with a long match, those with shorter ones share `blend` votes.
    """
    root = trees[tree, ROOT]
    if root == 0:
        return 0, 0
    log2 = trees[tree, LOG2]
    top = rules.max_match
    head = int(arena[bucket(arena, root, log2, hash_of(past, stop, top), 1)])
    sure, longest, echo = walk(
        arena, head, 1, top, top + 1, own, expected, past, stop, rules, writer,
        places, lengths, weights, 0,
    )  # fmt: skip
    if sure and (blend == 0.0 or 2 * sure >= len(places)):
        return sure, top
    low = rules.min_match
    head = int(arena[bucket(arena, root, log2, hash_of(past, stop, low), 0)])
    below = top if sure else top + 1
    count, longest, _ = walk(
        arena, head, 0, low, below, own, expected, past, stop, rules, writer,
        places, lengths, weights, sure,
    )  # fmt: skip
    shared = 0.0
    for item in range(sure, count):
        weights[item] *= SHORTER ** (longest - lengths[item])
        shared += weights[item]
    if sure:
        for item in range(sure, count):
            weights[item] *= blend / shared
        return count, top
    if count == 0 and echo:
        places[0] = echo
        weights[0] = 0.5
        return 1, top + 1
    return count, longest


@kernel
def move_on(
    arena: IntArray, places: LongArray, weights: FloatArray, start: int, stop: int
) -> tuple[int, float, bool]:
    """Move places[start:stop] one token on and drop those that have run dry.

    Returns:
        the new stop, the weight of all votes, whether there are votes and all are for one token.
    """
    alive = start
    total = 0.0
    first = -1
    others = 0
    for item in range(start, stop):
        follower = after(arena, places[item])
        if follower:
            token = arena[follower]
            if first < 0:
                first = token
            others += token != first
            places[alive] = follower
            weights[alive] = weights[item]
            total += weights[item]
            alive += 1
    return alive, total, alive > start and others == 0


@kernel
def step(
    arena: IntArray, places: LongArray, weights: FloatArray, count: int
) -> tuple[int, int, float, float]:
    """Move all candidates one token on, keep those of the winning token.

    Returns:
        the number kept, the token, its weight, the weight of all votes. 0 kept: all have run dry.
    """
    alive, total, united = move_on(arena, places, weights, 0, count)
    if united:
        return alive, arena[places[0]], total, total
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
    expected: int,
    row: int,
    past: IntArray,
    budget: int,
    least: float,
    rules: Rules,
    writer: int,
    experience: Experience,
    places: LongArray,
    lengths: IntArray,
    weights: FloatArray,
    tokens: IntArray,
    parents: IntArray,
    probabilities: FloatArray,
) -> int:
    """Draft up to `budget` tokens behind past[:max_match] into `tokens`; returns how many."""
    max_match = rules.max_match
    guessed = experience.tokens[row]
    ahead = experience.parents[row]
    bases = experience.bases[row]
    kinds = experience.kinds[row]
    drafted = 0
    path = 1.0
    while drafted < budget:
        count, matched = collect(
            arena, trees, tree, own, expected + drafted, past, max_match + drafted, rules,
            writer, 0.0, places, lengths, weights,
        )  # fmt: skip
        if count == 0:
            break
        while drafted < budget:
            count, token, weight, total = step(arena, places, weights, count)
            if count == 0:
                break
            base = base_of(weight, total, experience.doubts[matched])
            kind = kind_of(weight, total, matched, max_match)
            path *= corrected(base, experience.odds[kind])
            # The guess that ends the draft is remembered too, or its kind could never recover.
            guessed[drafted] = token
            ahead[drafted] = drafted - 1
            bases[drafted] = base
            kinds[drafted] = kind
            experience.waiting[row] = drafted + 1
            if path < least:
                return drafted
            tokens[drafted] = token
            parents[drafted] = drafted - 1
            probabilities[drafted] = path
            past[max_match + drafted] = token
            drafted += 1
            if matched < max_match:
                matched += 1
    return drafted


@kernel
def past_of(ring: IntArray, at: int, past: IntArray) -> None:
    """Write a row's last tokens, oldest first, to the front of `past`."""
    size = len(ring)
    past[: size - at] = ring[at:]
    past[size - at : size] = ring[:at]


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
    """Draft chains for rows; fills `offsets` `[B+1]` and the front of what follows it.

    Returns:
        the number of tokens drafted.
    """
    past = np.empty(rules.max_match + rules.longest, np.int32)
    places = np.empty(rules.max_candidates, np.int64)
    lengths = np.empty(rules.max_candidates, np.int32)
    weights = np.empty(rules.max_candidates, np.float32)
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
                places, lengths, weights, tokens[total:], parents[total:], probabilities[total:],
            )  # fmt: skip
        offsets[item + 1] = total
    return total
