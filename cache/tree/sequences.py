"""Stored rollouts: begin one, append to it, drop the oldest of a tree."""

from __future__ import annotations

from asyncrl.cache.tree.arena import (
    BLOCK,
    BLOCKS,
    FIRST,
    HEADER,
    LAST,
    LOG2,
    NEXT,
    POLICY_VERSION,
    PREV,
    SEQ_NEXT,
    SEQ_OPEN,
    SEQUENCE,
    SEQUENCES,
    SPAN,
    START,
    TOKENS,
    USED,
    VERSION,
    LongArray,
    allocate,
    release,
)
from asyncrl.cache.tree.index import drop_index, rebuild_index
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")


@kernel
def begin_sequence(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    ring: IntArray,
    at: int,
) -> int:
    """Start a sequence with its head, copied from the row's ring; return its name."""
    first = allocate(arena, state)
    if first == 0:
        return 0
    max_match = len(ring)
    for step in range(max_match):
        arena[first + HEADER + step] = ring[(at + step) % max_match]
    arena[first + SEQUENCE] = first
    arena[first + USED] = max_match
    arena[first + START] = -max_match
    arena[first + SEQ_OPEN] = 1
    arena[first + VERSION] = state[POLICY_VERSION]
    if trees[tree, LAST]:
        arena[trees[tree, LAST] + SEQ_NEXT] = first
    else:
        trees[tree, FIRST] = first
    trees[tree, LAST] = first
    trees[tree, BLOCKS] += 1
    state[SEQUENCES] += 1
    return first


@kernel
def append_token(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, end: int, token: int
) -> int:
    """Append a token to a sequence; return its position, or 0 when there is no room."""
    block = end & -BLOCK
    used = int(arena[block + USED])
    if used == SPAN:
        follower = allocate(arena, state)
        if follower == 0:
            return 0
        arena[block + NEXT] = follower
        arena[follower + PREV] = block
        arena[follower + SEQUENCE] = arena[block + SEQUENCE]
        arena[follower + START] = arena[block + START] + SPAN
        arena[follower + VERSION] = state[POLICY_VERSION]
        trees[tree, BLOCKS] += 1
        block = follower
        used = 0
    arena[block + HEADER + used] = token
    arena[block + USED] = used + 1
    state[TOKENS] += 1
    return block + HEADER + used


@kernel
def release_sequence(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, first: int, max_match: int
) -> int:
    """Free a sequence's blocks; return its response tokens. The caller updates links to it."""
    tokens = -max_match
    block = first
    while block:
        tokens += arena[block + USED]
        follower = arena[block + NEXT]
        release(arena, state, block)
        trees[tree, BLOCKS] -= 1
        block = follower
    state[TOKENS] -= tokens
    state[SEQUENCES] -= 1
    return tokens


@kernel
def trim_tree(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    target: int,
    min_match: int,
    max_match: int,
) -> int:
    """Drop oldest finished sequences to at most `target` blocks; return their tokens, -1: none."""
    dropped = 0
    count = 0
    kept_last = 0
    first = trees[tree, FIRST]
    while first:
        follower = arena[first + SEQ_NEXT]
        if trees[tree, BLOCKS] <= target or arena[first + SEQ_OPEN]:
            kept_last = first
        else:
            dropped += release_sequence(arena, state, trees, tree, first, max_match)
            count += 1
            if kept_last:
                arena[kept_last + SEQ_NEXT] = follower
            else:
                trees[tree, FIRST] = follower
        first = follower
    trees[tree, LAST] = kept_last
    if count == 0:
        return -1
    if kept_last:
        rebuild_index(arena, state, trees, tree, trees[tree, LOG2], min_match, max_match)
    else:
        drop_index(arena, state, trees, tree)
    return dropped
