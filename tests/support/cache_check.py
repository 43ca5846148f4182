"""Verifies all links, counters and budgets of a rollout cache; reads everything."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.arena import (
    BLOCK,
    BLOCKS,
    BUMP,
    FIRST,
    FREE,
    FREE_HEAD,
    HEADER,
    LAST,
    LIVE,
    LOG2,
    NEXT,
    OWN,
    POSITIONS,
    PREV,
    ROOT,
    SEQ_NEXT,
    SEQ_OPEN,
    SEQUENCE,
    SEQUENCES,
    SPAN,
    START,
    TOKENS,
    TREE,
    USED,
    VERSION,
    LongArray,
    bucket,
    depth_of,
    hash_back,
    node_at,
)
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")


class CacheCorrupt(Exception):  # noqa: N818 - named for what was found
    """The message says which invariant does not hold."""


def check(cache: RolloutCache) -> None:
    """Raise CacheCorrupt unless the whole cache is consistent and within its budget."""
    forest, rows = cache._forest, cache._rows
    used = np.array(sorted(forest._keys.values()), np.int32)
    problem = check_trees(
        forest.arena, forest.state, forest.trees, used, cache.config.min_match,
        cache.rules.max_match,
    )  # fmt: skip
    if problem:
        raise CacheCorrupt(PROBLEMS[problem])
    if forest.bytes > cache.config.max_bytes and forest.state[LIVE]:
        raise CacheCorrupt(f"{forest.bytes} bytes are above {cache.config.max_bytes}")
    own = rows.cursors[rows.cursors[:, TREE] >= 0, OWN]
    if not forest.arena[own[own > 0] + SEQ_OPEN].all():
        raise CacheCorrupt("an open row's sequence is not marked open")


PROBLEMS = (
    "",
    "live and free blocks do not add up to the allocated ones",
    "a free block is linked twice or outside the arena",
    "the free list's length is not its counter",
    "a block of a sequence is linked twice or outside the arena",
    "the blocks of a sequence are inconsistent",
    "a block of an index is linked twice or outside the arena",
    "a tree's block count is wrong",
    "a tree's list of sequences does not end where it should",
    "a chain leaves its tree, is in the wrong bucket or is circular",
    "the chains of a tree do not contain each of its positions once",
    "the count of live blocks is wrong",
    "the count of cached tokens or sequences is wrong",
)

Owners = NDArray[np.int32]


@kernel
def claim(owners: Owners, block: int, bump: int, owner: int) -> bool:
    """Record a block's owner; return False if it has one or is not a block."""
    if block < BLOCK or block >= bump or block % BLOCK or owners[block // BLOCK]:
        return False
    owners[block // BLOCK] = owner
    return True


@kernel
def check_free(arena: IntArray, state: LongArray, owners: Owners) -> int:
    """Claim the free list; return a problem's number or 0."""
    if state[LIVE] + state[FREE] != state[BUMP] // BLOCK - 1:
        return 1
    block = state[FREE_HEAD]
    seen = 0
    while block:
        if not claim(owners, block, state[BUMP], -1):
            return 2
        seen += 1
        block = arena[block]
    return 0 if seen == state[FREE] else 3


@kernel
def check_sequence(
    arena: IntArray, state: LongArray, owners: Owners, first: int, owner: int, max_match: int
) -> tuple[int, int, int]:
    """Claim a sequence's blocks; return problem, blocks, tokens (including its head)."""
    blocks = 0
    tokens = 0
    former = 0
    block = first
    while block:
        if not claim(owners, block, state[BUMP], owner):
            return 4, 0, 0
        used = arena[block + USED]
        if (
            arena[block + PREV] != former
            or arena[block + SEQUENCE] != first
            or arena[block + VERSION] < 0
            or arena[block + START] != tokens - max_match
            or used < 1
            or used > SPAN
            or (arena[block + NEXT] and used < SPAN)
        ):
            return 5, 0, 0
        blocks += 1
        tokens += used
        former = block
        block = arena[block + NEXT]
    return 0, blocks, tokens


@kernel
def check_chains(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    owners: Owners,
    chain: int,
    length: int,
) -> int:
    """Check the short or the long chains of a tree; return a problem's number or 0."""
    root = trees[tree, ROOT]
    log2 = trees[tree, LOG2]
    depth = depth_of(log2)
    seen = 0
    for word in range(chain, 2 << log2, 2):
        slot = node_at(arena, root, depth, 0, word >> 7) + (word & 127)
        position = int(arena[slot])
        while position:
            block = position & -BLOCK
            offset = position - block - HEADER
            if (
                position < 0
                or position >= len(arena)
                or owners[block // BLOCK] != tree + 1
                or offset < 0
                or offset >= arena[block + USED]
                or seen > trees[tree, POSITIONS]
                or bucket(arena, root, log2, hash_back(arena, position, length), chain) != slot
            ):
                return 9
            seen += 1
            position = int(arena[position + (chain + 1) * SPAN])
    return 0 if seen == trees[tree, POSITIONS] else 10


@kernel
def check_index(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, owners: Owners
) -> int:
    """Claim the blocks of a tree's index; return their number, or -1 if one is not a block."""
    root = trees[tree, ROOT]
    if root == 0:
        return 0
    depth = depth_of(trees[tree, LOG2])
    nodes = max(1, (2 << trees[tree, LOG2]) // BLOCK)
    total = 0
    # From the root down: a node is followed only after it was verified to be a block.
    for level in range(depth, -1, -1):
        count = (nodes + (1 << (7 * level)) - 1) >> (7 * level)
        for item in range(count):
            # Not the number of a sequence's owner, so that a chain into an index is detected.
            if not claim(owners, node_at(arena, root, depth, level, item), state[BUMP], -tree - 2):
                return -1
        total += count
    return total


@kernel
def check_tree(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    owners: Owners,
    min_match: int,
    max_match: int,
) -> tuple[int, int, int]:
    """Verify one tree; return problem, sequences, response tokens."""
    blocks = 0
    tokens = 0
    sequences = 0
    last = 0
    first = trees[tree, FIRST]
    while first:
        problem, more, length = check_sequence(arena, state, owners, first, tree + 1, max_match)
        if problem:
            return problem, 0, 0
        blocks += more
        tokens += length - max_match
        sequences += 1
        last = first
        first = arena[first + SEQ_NEXT]
    if last != trees[tree, LAST]:
        return 8, 0, 0
    more = check_index(arena, state, trees, tree, owners)
    if more < 0:
        return 6, 0, 0
    if blocks + more != trees[tree, BLOCKS]:
        return 7, 0, 0
    if trees[tree, POSITIONS] != tokens + sequences:
        return 10, 0, 0
    problem = 0
    if more:
        problem = check_chains(arena, trees, tree, owners, 0, min_match)
        if problem == 0:
            problem = check_chains(arena, trees, tree, owners, 1, max_match)
    return problem, sequences, tokens


@kernel
def check_trees(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    used: IntArray,
    min_match: int,
    max_match: int,
) -> int:
    """Verify all existing trees `used` `[T]`; return an index into PROBLEMS, 0 if none."""
    owners = np.zeros(state[BUMP] // BLOCK, np.int32)
    problem = check_free(arena, state, owners)
    if problem:
        return problem
    blocks = 0
    tokens = 0
    sequences = 0
    for tree in used:
        problem, more_sequences, more_tokens = check_tree(
            arena, state, trees, tree, owners, min_match, max_match
        )
        if problem:
            return problem
        blocks += trees[tree, BLOCKS]
        tokens += more_tokens
        sequences += more_sequences
    if blocks != state[LIVE]:
        return 11
    return 0 if tokens == state[TOKENS] and sequences == state[SEQUENCES] else 12
