"""Finds earlier places of a row's recent tokens, which vote on the next one.

A *candidate* is a position whose past equals the row's; the token after it is its vote. A vote
counts less the more policy versions ago it was generated, the further it is from the row's own
place in its response and, if no match is long, the shorter its match is.
"""

from typing import NamedTuple

import numpy as np

from asyncrl.cache.tree.arena import (
    BLOCK,
    LOG2,
    LONG,
    ROOT,
    SEQUENCE,
    SHORT,
    SPAN,
    VERSION,
    LongArray,
    bucket,
    hash_of,
    index_of,
    next_position,
    previous_position,
)
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

kernel = kernels_of("cache/tree")

VISITS = 4
"""Positions visited per candidate wanted: bounds the time in a tree full of repetitions."""
SHORTER = np.float32(0.25)
"""Factor on a vote for each token that its match is shorter than the longest."""
OLDEST = 1 / 16
"""Lowest weight of an old vote: without anything newer it is still the best guess."""
FAR = 0.1
"""Lowest weight of a distant candidate: a row shifted against its siblings must draft too."""
UNKNOWN = -(1 << 30)
"""Index of a row whose tokens are not stored: all candidates count alike."""


class Rules(NamedTuple):
    """Settings of the cache for compiled code."""

    min_match: int
    max_match: int
    max_candidates: int
    max_draft_tokens: int
    version_weights: FloatArray
    """`[A]` weight of a vote by its age in policy versions; the last one for all older votes."""


class Search(NamedTuple):
    """The searched trees and the rules."""

    arena: IntArray
    trees: LongArray
    rules: Rules
    policy_version: int


class RowState(NamedTuple):
    """The row that is drafted for."""

    row: int
    tree: int
    own: int
    """Name of the row's own sequence; not positive when it has none."""
    last: int
    """Index of the row's last token in its response, -1 before the first; or UNKNOWN."""


class Candidates(NamedTuple):
    """Working space for K candidates, `[K]` each."""

    positions: LongArray
    lengths: IntArray
    """Tokens of the match."""
    weights: FloatArray
    """Weight of the vote."""


def version_weights(half_life: float) -> FloatArray:
    """Return the weights of votes by age in policy versions."""
    versions = np.arange(min(int(4 * half_life) + 2, 1 << 16))
    weights: FloatArray = np.maximum(np.exp2(-versions / half_life), OLDEST).astype(np.float32)
    return weights


@kernel
def agreement(arena: IntArray, position: int, tokens: IntArray, stop: int, longest: int) -> int:
    """Return how many tokens, up to `longest`, before `position` and tokens[stop] are equal."""
    for length in range(longest):
        if arena[position] != tokens[stop - 1 - length]:
            return length
        if length + 1 < longest:
            position = previous_position(arena, position)
    return longest


@kernel
def nearness(arena: IntArray, position: int, expected: int) -> float:
    """Return the weight of a candidate by its distance from the `expected` index."""
    if expected < UNKNOWN // 2:
        return 1.0
    return max(FAR, 1.0 / (1.0 + abs(index_of(arena, position) - expected)))


@kernel
def last_index(arena: IntArray, own: int, end: int) -> int:
    """Return `RowState.last` of a row with sequence `own`, whose last token is at `end`."""
    if own > 0:
        return index_of(arena, end)
    return -1 if own == 0 else UNKNOWN


@kernel
def walk(
    search: Search,
    row: RowState,
    ahead: int,
    past: IntArray,
    stop: int,
    chain: int,
    shortest: int,
    below: int,
    candidates: Candidates,
    count: int,
) -> tuple[int, int, int]:
    """Add positions of a chain whose match is at least `shortest` and below `below` tokens long.

    Returns the number of candidates, the longest new match, and the newest own position (0: none).
    """
    # Looked up once: each access to an array of a tuple counts its references.
    arena = search.arena
    max_match = search.rules.max_match
    aging = search.rules.version_weights
    positions = candidates.positions
    lengths = candidates.lengths
    weights = candidates.weights
    expected = row.last + ahead
    longest = 0
    echo = 0
    hashed = hash_of(past, stop, shortest)
    root = search.trees[row.tree, ROOT]
    position = int(arena[bucket(arena, root, search.trees[row.tree, LOG2], hashed, chain)])
    visits = VISITS * len(positions)
    while position and visits and count < len(positions):
        visits -= 1
        length = agreement(arena, position, past, stop, max_match)
        if shortest <= length < below and next_position(arena, position):
            block = position & -BLOCK
            if arena[block + SEQUENCE] != row.own:
                positions[count] = position
                lengths[count] = length
                age = min(abs(search.policy_version - arena[block + VERSION]), len(aging) - 1)
                weights[count] = aging[age] * nearness(arena, position, expected)
                longest = max(longest, length)
                count += 1
            elif echo == 0:
                echo = position
        position = int(arena[position + (chain + 1) * SPAN])
    return count, longest, echo


@kernel
def collect(
    search: Search,
    row: RowState,
    ahead: int,
    past: IntArray,
    stop: int,
    blend: float,
    candidates: Candidates,
) -> tuple[int, int]:
    """Find candidates; return their number and the length of the longest match.

    The drafted token is the one after past[:stop], `ahead` tokens after the row's last one. When
    only a few candidates have a long match, those with shorter ones share `blend` votes. Positions
    in the row's own sequence count only when there are no others, and only with a long match: a row
    that repeats itself. The match is then reported as max_match + 1 long.
    """
    if search.trees[row.tree, ROOT] == 0:
        return 0, 0
    positions = candidates.positions
    weights = candidates.weights
    top = search.rules.max_match
    sure, longest, echo = walk(search, row, ahead, past, stop, LONG, top, top + 1, candidates, 0)
    if sure and (blend == 0.0 or 2 * sure >= len(positions)):
        return sure, top
    low = search.rules.min_match
    below = top if sure else top + 1
    count, longest, _ = walk(search, row, ahead, past, stop, SHORT, low, below, candidates, sure)
    shared = 0.0
    for item in range(sure, count):
        weights[item] *= SHORTER ** (longest - candidates.lengths[item])
        shared += weights[item]
    if sure:
        if shared > 0.0:
            for item in range(sure, count):
                weights[item] *= blend / shared
        return count, top
    if count == 0 and echo:
        positions[0] = echo
        weights[0] = 0.5
        return 1, top + 1
    return count, longest


@kernel
def move_on(
    arena: IntArray, positions: LongArray, weights: FloatArray, start: int, stop: int
) -> tuple[int, float, bool]:
    """Move positions[start:stop] one token ahead and drop those at the end of their sequence.

    Returns the new stop, the weight of all votes, and True if all votes are for one token.
    """
    alive = start
    total = 0.0
    first = -1
    others = 0
    for item in range(start, stop):
        follower = next_position(arena, positions[item])
        if follower:
            token = arena[follower]
            if first < 0:
                first = token
            others += token != first
            positions[alive] = follower
            weights[alive] = weights[item]
            total += weights[item]
            alive += 1
    return alive, total, alive > start and others == 0
