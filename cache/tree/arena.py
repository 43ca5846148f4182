"""The layout of stored rollouts: blocks of words in one flat array.

The *arena* is one int32 array cut into blocks of 128 words. Word 0 of the array is never used, so
zero means "no link" everywhere. A block is free, or part of a sequence, or part of a tree's index.

    sequence block   8 header words | 40 tokens | 40 short links | 40 long links

A *sequence* is a stored rollout: its *head* (the last `max_match` tokens of the context before the
response) and the response, in linked blocks. The address of its first block is its name. A
*position* is the address of a token's word.

The compiled functions here, in `cache.tree.index` and in `asyncrl.cache.tree.sequences` return
codes and never raise; the caller checks the arguments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")

LongArray = NDArray[np.int64]

BLOCK = 128
HEADER = 8
SPAN = 40
"""Tokens of a block. A token's short link is SPAN words after it, its long link 2 * SPAN."""

# Header words of a sequence block.
NEXT, PREV, SEQUENCE, USED, VERSION = 0, 1, 2, 3, 4
START = 7
"""Index of the block's first token in its response; tokens of the head have negative indices."""
# Header words that only a sequence's first block uses.
SEQ_NEXT, SEQ_OPEN = 5, 6

# Words of `state`: counters of the whole arena.
LIVE, FREE_HEAD, FREE, BUMP, LIMIT, NEEDED, AT_ROW, AT_TOKEN, TOKENS, SEQUENCES, REFUSED = range(11)
POLICY_VERSION = 11
STATE_WORDS = 12

# Words of `trees`, which has one line per prompt.
ROOT, LOG2, POSITIONS, FIRST, LAST, BLOCKS = range(6)
TREE_WORDS = 6

# Words of `cursors`, which has one line per open row.
TREE, OWN, END, RING_AT, HASH_SHORT, HASH_LONG = range(6)
CURSOR_WORDS = 6
CLOSED, DETACHED = -2, -1
"""Values of TREE: the row is not open; the row has no tree, so it neither stores nor drafts."""
MUTED = -1
"""Value of OWN: the row's tokens are no longer stored, because there was no room."""


@kernel
def allocate(arena: IntArray, state: LongArray) -> int:
    """Allocate a zeroed block; return its address, or 0 when the limit is reached."""
    if state[LIVE] >= state[LIMIT]:
        return 0
    block = state[FREE_HEAD]
    if block:
        state[FREE_HEAD] = arena[block]
        state[FREE] -= 1
    else:
        block = state[BUMP]
        state[BUMP] += BLOCK
    state[LIVE] += 1
    for word in range(block, block + BLOCK):
        arena[word] = 0
    return int(block)


@kernel
def release(arena: IntArray, state: LongArray, block: int) -> None:
    """Free a block."""
    arena[block] = state[FREE_HEAD]
    state[FREE_HEAD] = block
    state[FREE] += 1
    state[LIVE] -= 1


@kernel
def next_position(arena: IntArray, position: int) -> int:
    """Return the position of the next token of the sequence; 0 at its current end."""
    block = position & -BLOCK
    if position - block - HEADER + 1 < arena[block + USED]:
        return position + 1
    follower = int(arena[block + NEXT])
    return follower + HEADER if follower else 0


@kernel
def previous_position(arena: IntArray, position: int) -> int:
    """Return the position of the previous token, which must exist."""
    block = position & -BLOCK
    if position - block > HEADER:
        return position - 1
    return int(arena[block + PREV]) + HEADER + SPAN - 1


@kernel
def index_of(arena: IntArray, position: int) -> int:
    """Return the index of a position's token in its response, from 0; negative in the head."""
    block = position & -BLOCK
    return int(arena[block + START]) + position - block - HEADER
