"""Where the rollouts lie: blocks in one flat array, sequences of blocks, an index per tree.

The *arena* is one int32 array cut into blocks of 128 words; word 0 of the array is "nowhere", so a
zero is an empty link everywhere. A block is free, or part of a sequence, or part of an index.

    sequence block   8 words of header | 40 tokens | 40 short links | 40 long links

A *position* is the address of a token's word. Every response token, and the last token of the
context before it, is *indexed* twice: under a hash of the last `min_match` tokens up to it, and
under one of the last `max_match`. A bucket holds the newest position with that hash; the link
beside a token leads to the next older one. So all positions with one recent past hang on one
chain: a node of a suffix tree, kept as the list of its leaves. See docs/decisions/0002.

The index is a radix tree of blocks (128 words each), doubled and rebuilt when chains grow long:
O(1) amortised per token. All functions here are compiled; they return codes, never raise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cache.jit import kernel
from rollout.trajectory import IntArray

LongArray = NDArray[np.int64]

BLOCK = 128
HEADER = 8
SPAN = 40
LINK = (SPAN, 2 * SPAN)
"""Distance from a token's word to its short and to its long link."""

# Header words of a sequence block.
NEXT, PREV, SEQUENCE, USED, VERSION = 0, 1, 2, 3, 4
START = 7
"""Index of the block's first token in its response; the head before it has negative ones."""
# Only in a sequence's first block, whose address is the sequence's name.
SEQ_NEXT, SEQ_OPEN = 5, 6

# `state`: the arena's own counters.
LIVE, FREE_HEAD, FREE, BUMP, LIMIT, NEEDED, AT_ROW, AT_TOKEN, TOKENS, SEQUENCES, REFUSED = range(11)
WRITER = 11  # the policy version that writes now
STATE_WORDS = 12

# `trees`: one row per prompt.
ROOT, LOG2, POSITIONS, FIRST, LAST, BLOCKS = range(6)
TREE_WORDS = 6

# `cursors`: one row per open request.
TREE, OWN, END, RING_AT, HASH_SHORT, HASH_LONG = range(6)
CURSOR_WORDS = 6
CLOSED, DETACHED = -2, -1
"""Values of TREE: no request, a request without a tree (drafting off)."""
MUTED = -1
"""Value of OWN: the request's tokens are no longer stored, there was no room."""

DONE, NEED_BLOCKS, TREE_FULL = 0, 1, 2
"""What `extend` returns."""

MASK = 0xFFFFFFFF
BASE = 0x01000193
GOLDEN = 0x9E3779B1
SMALLEST_LOG2 = 6  # 64 buckets per order: one block
LARGEST_LOG2 = 27  # a radix of four levels


@kernel
def take(arena: IntArray, state: LongArray) -> int:
    """A zeroed block, or 0 when the limit is reached."""
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
def give(arena: IntArray, state: LongArray, block: int) -> None:
    """Return a block."""
    arena[block] = state[FREE_HEAD]
    state[FREE_HEAD] = block
    state[FREE] += 1
    state[LIVE] -= 1


@kernel
def after(arena: IntArray, position: int) -> int:
    """The position behind `position` in its sequence, 0 at the sequence's (present) end."""
    block = position & -BLOCK
    if position - block - HEADER + 1 < arena[block + USED]:
        return position + 1
    follower = int(arena[block + NEXT])
    return follower + HEADER if follower else 0


@kernel
def before(arena: IntArray, position: int) -> int:
    """The position before `position`; the caller knows that there is one."""
    block = position & -BLOCK
    if position - block > HEADER:
        return position - 1
    return int(arena[block + PREV]) + HEADER + SPAN - 1


@kernel
def index_of(arena: IntArray, position: int) -> int:
    """Which token of its response a position holds, from 0; the head's are negative."""
    block = position & -BLOCK
    return int(arena[block + START]) + position - block - HEADER


@kernel
def depth_of(log2: int) -> int:
    """Levels of directories above the leaves of an index with 2 ** log2 buckets per order."""
    return log2 // 7  # 2 ** (log2 + 1) words, 7 bits a level


@kernel
def node_at(arena: IntArray, root: int, depth: int, level: int, item: int) -> int:
    """Address of the `item`-th node of a level; level 0 are the leaves."""
    node = root
    for upper in range(depth - 1, level - 1, -1):
        node = int(arena[node + ((item >> (7 * (upper - level))) & 127)])
    return node


@kernel
def bucket(arena: IntArray, root: int, log2: int, hashed: int, order: int) -> int:
    """Address of the bucket of a hash; order 0 is short, 1 long."""
    word = ((((hashed * GOLDEN) & MASK) >> (32 - log2)) << 1) | order
    return node_at(arena, root, depth_of(log2), 0, word >> 7) + (word & 127)


@kernel
def index_blocks(log2: int) -> int:
    """Blocks that an index of 2 ** log2 buckets per order takes."""
    nodes = max(1, (2 << log2) // BLOCK)
    total = nodes
    while nodes > 1:
        nodes = (nodes + 127) // 128
        total += nodes
    return total


@kernel
def drop_index(arena: IntArray, state: LongArray, trees: LongArray, tree: int) -> None:
    """Free a tree's index, leaves first."""
    log2 = trees[tree, LOG2]
    root = trees[tree, ROOT]
    if root == 0:
        return
    depth = depth_of(log2)
    nodes = max(1, (2 << log2) // BLOCK)
    for level in range(depth + 1):
        for item in range(nodes):
            give(arena, state, node_at(arena, root, depth, level, item))
        nodes = (nodes + 127) // 128
    trees[tree, BLOCKS] -= index_blocks(log2)
    trees[tree, ROOT] = 0
    trees[tree, POSITIONS] = 0


@kernel
def make_index(arena: IntArray, state: LongArray, trees: LongArray, tree: int, log2: int) -> None:
    """Lay out an empty index; the caller has made sure that there is room for it."""
    depth = depth_of(log2)
    root = take(arena, state)
    nodes = max(1, (2 << log2) // BLOCK)
    for level in range(depth - 1, -1, -1):
        count = (nodes + (1 << (7 * level)) - 1) >> (7 * level)
        for item in range(count):
            parent = node_at(arena, root, depth, level + 1, item >> 7)
            arena[parent + (item & 127)] = take(arena, state)
    trees[tree, ROOT] = root
    trees[tree, LOG2] = log2
    trees[tree, POSITIONS] = 0
    trees[tree, BLOCKS] += index_blocks(log2)


@kernel
def hang(
    arena: IntArray, trees: LongArray, tree: int, position: int, short: int, long: int
) -> None:
    """Put a position at the head of its two chains."""
    root = trees[tree, ROOT]
    log2 = trees[tree, LOG2]
    slot = bucket(arena, root, log2, short, 0)
    arena[position + SPAN] = arena[slot]
    arena[slot] = position
    slot = bucket(arena, root, log2, long, 1)
    arena[position + 2 * SPAN] = arena[slot]
    arena[slot] = position
    trees[tree, POSITIONS] += 1


@kernel
def hash_back(arena: IntArray, position: int, length: int) -> int:
    """Hash of the `length` tokens that end at a position."""
    hashed = 0
    scale = 1
    for step in range(length):
        hashed = (hashed + (arena[position] + 1) * scale) & MASK
        scale = (scale * BASE) & MASK
        if step + 1 < length:
            position = before(arena, position)
    return hashed


@kernel
def rebuild(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    log2: int,
    min_match: int,
    max_match: int,
) -> None:
    """Index all of a tree's sequences anew, oldest first. Room must be there."""
    drop_index(arena, state, trees, tree)
    make_index(arena, state, trees, tree, log2)
    scale_short = power(min_match - 1)
    scale_long = power(max_match - 1)
    first = trees[tree, FIRST]
    while first:
        position = first + HEADER + max_match - 1
        short = hash_back(arena, position, min_match)
        long = hash_back(arena, position, max_match)
        leave_short = first + HEADER + max_match - min_match
        leave_long = first + HEADER
        while True:
            hang(arena, trees, tree, position, short, long)
            position = after(arena, position)
            if position == 0:
                break
            token = arena[position]
            short = roll(short, arena[leave_short], token, scale_short)
            long = roll(long, arena[leave_long], token, scale_long)
            leave_short = after(arena, leave_short)
            leave_long = after(arena, leave_long)
        first = arena[first + SEQ_NEXT]


@kernel
def power(exponent: int) -> int:
    """BASE ** exponent modulo 2 ** 32."""
    out = 1
    for _ in range(exponent):
        out = (out * BASE) & MASK
    return out


@kernel
def roll(hashed: int, leaving: int, entering: int, scale: int) -> int:
    """Move a hash one token on; `scale` is BASE ** (length - 1)."""
    # One is added after the first product, in 64 bits: a token may be 2 ** 31 - 1.
    hashed = (hashed - scale - leaving * scale) & MASK
    return (hashed * BASE + 1 + entering) & MASK


@kernel
def give_sequence(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, first: int, max_match: int
) -> int:
    """Free a sequence's blocks, not its place in lists; returns its response tokens."""
    tokens = -max_match
    block = first
    while block:
        tokens += arena[block + USED]
        follower = arena[block + NEXT]
        give(arena, state, block)
        trees[tree, BLOCKS] -= 1
        block = follower
    state[TOKENS] -= tokens
    state[SEQUENCES] -= 1
    return tokens


@kernel
def trim(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    target: int,
    min_match: int,
    max_match: int,
) -> int:
    """Drop a tree's oldest finished sequences until it takes at most `target` blocks.

    Returns the response tokens dropped; -1 when no sequence could be dropped.
    """
    dropped = 0
    count = 0
    kept_last = 0
    first = trees[tree, FIRST]
    while first:
        follower = arena[first + SEQ_NEXT]
        if trees[tree, BLOCKS] <= target or arena[first + SEQ_OPEN]:
            kept_last = first
        else:
            dropped += give_sequence(arena, state, trees, tree, first, max_match)
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
        rebuild(arena, state, trees, tree, trees[tree, LOG2], min_match, max_match)
    else:
        drop_index(arena, state, trees, tree)
    return dropped


@kernel
def begin(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    ring: IntArray,
    at: int,
) -> int:
    """Start a sequence with its head, the last `max_match` tokens before it; returns its name."""
    first = take(arena, state)
    if first == 0:
        return 0
    max_match = len(ring)
    for step in range(max_match):
        arena[first + HEADER + step] = ring[(at + step) % max_match]
    arena[first + SEQUENCE] = first
    arena[first + USED] = max_match
    arena[first + START] = -max_match
    arena[first + SEQ_OPEN] = 1
    arena[first + VERSION] = state[WRITER]
    if trees[tree, LAST]:
        arena[trees[tree, LAST] + SEQ_NEXT] = first
    else:
        trees[tree, FIRST] = first
    trees[tree, LAST] = first
    trees[tree, BLOCKS] += 1
    state[SEQUENCES] += 1
    return first


@kernel
def append(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, end: int, token: int
) -> int:
    """Write a token behind a sequence's last one; returns its position, 0 without room."""
    block = end & -BLOCK
    used = int(arena[block + USED])
    if used == SPAN:
        follower = take(arena, state)
        if follower == 0:
            return 0
        arena[block + NEXT] = follower
        arena[follower + PREV] = block
        arena[follower + SEQUENCE] = arena[block + SEQUENCE]
        arena[follower + START] = arena[block + START] + SPAN
        arena[follower + VERSION] = state[WRITER]
        trees[tree, BLOCKS] += 1
        block = follower
        used = 0
    arena[block + HEADER + used] = token
    arena[block + USED] = used + 1
    state[TOKENS] += 1
    return block + HEADER + used
