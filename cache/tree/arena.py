"""Stored rollouts: blocks of words in one flat array, for appending, dropping and copying.

The *arena* is one int32 array cut into blocks of 128 words. Word 0 of the array is never used, so
zero means "no link" everywhere. A block is free, or part of a sequence, or part of a tree's index.

    sequence block   8 header words | 40 tokens | 40 short links | 40 long links

A *sequence* is a stored rollout: its *head* (the last `max_match` tokens of the context before the
response, -1 if there were fewer) and the response, in linked blocks. The address of its first block
is its name. A *position* is the address of a token's word.

The *index* of a tree finds earlier places of its last few tokens. Every response token, and the
last token of the head, is indexed twice: under a hash of the last `min_match` tokens up to and
including it (its *short* chain) and under one of the last `max_match` (its *long* chain). A bucket
holds the newest position with that hash, and the link stored with each token leads to the next
older one. So all positions with the same recent past are on one chain: a node of a suffix tree,
kept as the list of its leaves. See docs/decisions/0002.

The buckets are leaves of a radix tree of blocks. It is doubled and rebuilt when chains become long,
which costs O(1) amortised per token.

The compiled functions return codes and never raise; the caller checks the arguments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.estimate import Experience, learn, revise
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

SHORT, LONG = 0, 1
"""The two chains of each position."""

MASK = 0xFFFFFFFF
BASE = 0x01000193
"""A hash is a polynomial in BASE modulo 2 ** 32."""
GOLDEN = 0x9E3779B1
"""Multiplier that spreads hashes over the buckets."""
SMALLEST_LOG2 = 6  # 64 buckets per chain length: one block
LARGEST_LOG2 = 27  # a radix tree of four levels

DONE, NEED_BLOCKS, TREE_FULL = 0, 1, 2
"""Codes of `extend`: finished; too few free blocks in the arena; the tree is at its limit."""


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


@kernel
def hash_of(tokens: IntArray, stop: int, length: int) -> int:
    """Hash tokens[stop - length : stop]."""
    hashed = 0
    for index in range(stop - length, stop):
        hashed = (hashed * BASE + 1 + int(tokens[index])) & MASK
    return hashed


@kernel
def roll_hash(hashed: int, leaving: int, entering: int, scale: int) -> int:
    """Move a rolling hash one token ahead; `scale` is BASE ** (length - 1)."""
    # One is added after the first product, in 64 bits: a token may be 2 ** 31 - 1.
    hashed = (hashed - scale - leaving * scale) & MASK
    return (hashed * BASE + 1 + entering) & MASK


@kernel
def power_of_base(exponent: int) -> int:
    """Return BASE ** exponent modulo 2 ** 32."""
    out = 1
    for _ in range(exponent):
        out = (out * BASE) & MASK
    return out


@kernel
def hash_back(arena: IntArray, position: int, length: int) -> int:
    """Hash the `length` tokens that end at a position."""
    hashed = 0
    scale = 1
    for step in range(length):
        hashed = (hashed + (arena[position] + 1) * scale) & MASK
        scale = (scale * BASE) & MASK
        if step + 1 < length:
            position = previous_position(arena, position)
    return hashed


@kernel
def depth_of(log2: int) -> int:
    """Return the levels above the leaves of an index with 2 ** log2 buckets per chain."""
    return log2 // 7  # 2 ** (log2 + 1) words, 7 bits a level


@kernel
def node_at(arena: IntArray, root: int, depth: int, level: int, item: int) -> int:
    """Return the address of the `item`-th node of a level; level 0 holds the leaves."""
    node = root
    for upper in range(depth - 1, level - 1, -1):
        node = int(arena[node + ((item >> (7 * (upper - level))) & 127)])
    return node


@kernel
def bucket(arena: IntArray, root: int, log2: int, hashed: int, chain: int) -> int:
    """Return the address of the bucket of a hash; `chain` is SHORT or LONG."""
    word = ((((hashed * GOLDEN) & MASK) >> (32 - log2)) << 1) | chain
    return node_at(arena, root, depth_of(log2), 0, word >> 7) + (word & 127)


@kernel
def index_blocks(log2: int) -> int:
    """Return the blocks of an index with 2 ** log2 buckets per chain."""
    nodes = max(1, (2 << log2) // BLOCK)
    total = nodes
    while nodes > 1:
        nodes = (nodes + 127) // 128
        total += nodes
    return total


@kernel
def make_index(arena: IntArray, state: LongArray, trees: LongArray, tree: int, log2: int) -> None:
    """Allocate an empty index; the caller has made sure that there is room."""
    depth = depth_of(log2)
    root = allocate(arena, state)
    nodes = max(1, (2 << log2) // BLOCK)
    for level in range(depth - 1, -1, -1):
        count = (nodes + (1 << (7 * level)) - 1) >> (7 * level)
        for item in range(count):
            parent = node_at(arena, root, depth, level + 1, item >> 7)
            arena[parent + (item & 127)] = allocate(arena, state)
    trees[tree, ROOT] = root
    trees[tree, LOG2] = log2
    trees[tree, POSITIONS] = 0
    trees[tree, BLOCKS] += index_blocks(log2)


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
            release(arena, state, node_at(arena, root, depth, level, item))
        nodes = (nodes + 127) // 128
    trees[tree, BLOCKS] -= index_blocks(log2)
    trees[tree, ROOT] = 0
    trees[tree, POSITIONS] = 0


@kernel
def link_position(
    arena: IntArray, trees: LongArray, tree: int, position: int, short: int, long: int
) -> None:
    """Put a position at the front of its two chains, given its two hashes."""
    root = trees[tree, ROOT]
    log2 = trees[tree, LOG2]
    slot = bucket(arena, root, log2, short, SHORT)
    arena[position + SPAN] = arena[slot]
    arena[slot] = position
    slot = bucket(arena, root, log2, long, LONG)
    arena[position + 2 * SPAN] = arena[slot]
    arena[slot] = position
    trees[tree, POSITIONS] += 1


@kernel
def rebuild_index(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    log2: int,
    min_match: int,
    max_match: int,
) -> None:
    """Index all sequences of a tree again, oldest first; the caller has made room."""
    drop_index(arena, state, trees, tree)
    make_index(arena, state, trees, tree, log2)
    scale_short = power_of_base(min_match - 1)
    scale_long = power_of_base(max_match - 1)
    first = trees[tree, FIRST]
    while first:
        position = first + HEADER + max_match - 1
        short = hash_back(arena, position, min_match)
        long = hash_back(arena, position, max_match)
        leave_short = first + HEADER + max_match - min_match
        leave_long = first + HEADER
        while True:
            link_position(arena, trees, tree, position, short, long)
            position = next_position(arena, position)
            if position == 0:
                break
            token = arena[position]
            short = roll_hash(short, arena[leave_short], token, scale_short)
            long = roll_hash(long, arena[leave_long], token, scale_long)
            leave_short = next_position(arena, leave_short)
            leave_long = next_position(arena, leave_long)
        first = arena[first + SEQ_NEXT]


@dataclass(frozen=True, slots=True)
class StoredRollouts:
    """Rollouts of one prompt, oldest first."""

    key: str
    lengths: IntArray
    """`[S]` tokens of each rollout, including its head; more than the head has."""
    versions: IntArray
    """`[S]` policy version that generated the last token of each."""
    tokens: IntArray
    """`[N]` rollout after rollout: head, then response."""


def are_valid_tokens(heads: IntArray, tokens: IntArray, vocabulary: int) -> bool:
    """Return True if rollouts hold only token ids, and -1 only to pad their heads.

    `heads` `[S, H]` are the first H of the tokens of each rollout, and `tokens` `[N]` all of them.
    """
    padding = heads < 0
    at_front = bool((padding[:, :-1] | ~padding[:, 1:]).all())
    return (
        at_front
        and int(heads.min()) >= -1
        and int((tokens < 0).sum()) == int(padding.sum())
        and int(tokens.max()) < vocabulary
    )


@kernel
def length(arena: IntArray, first: int) -> int:
    """Return the number of tokens of a sequence, including its head."""
    tokens = 0
    block = first
    while block:
        tokens += arena[block + USED]
        block = arena[block + NEXT]
    return tokens


@kernel
def copy(arena: IntArray, first: int, out: IntArray) -> tuple[int, int]:
    """Write a sequence, head first, to the front of `out`; return its tokens and its version."""
    at = 0
    version = 0
    block = first
    while block:
        version = arena[block + VERSION]
        for word in range(block + HEADER, block + HEADER + arena[block + USED]):
            out[at] = arena[word]
            at += 1
        block = arena[block + NEXT]
    return at, version


@kernel
def count(arena: IntArray, trees: LongArray, tree: int) -> tuple[int, int]:
    """Return the finished sequences of a tree, and their tokens, heads included."""
    sequences = 0
    tokens = 0
    first = trees[tree, FIRST]
    while first:
        if not arena[first + SEQ_OPEN]:
            sequences += 1
            tokens += length(arena, first)
        first = arena[first + SEQ_NEXT]
    return sequences, tokens


@kernel
def finished(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    lengths: IntArray,
    versions: IntArray,
    tokens: IntArray,
) -> None:
    """Fill arrays of the sizes that `count` gave, oldest sequence first."""
    at = 0
    item = 0
    first = trees[tree, FIRST]
    while first:
        if not arena[first + SEQ_OPEN]:
            taken, version = copy(arena, first, tokens[at:])
            lengths[item] = taken
            versions[item] = version
            at += taken
            item += 1
        first = arena[first + SEQ_NEXT]


@kernel
def begin_sequence(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, ring: IntArray, at: int
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


@kernel
def acceptable(cursors: LongArray, rows: IntArray, tokens: IntArray, offsets: IntArray) -> bool:
    """Return True if `extend` may take these: open rows, rising offsets that fit, valid tokens."""
    if len(offsets) != len(rows) + 1 or offsets[0] != 0 or offsets[len(rows)] != len(tokens):
        return False
    for i in range(len(rows)):
        row = rows[i]
        if row < 0 or row >= len(cursors) or cursors[row, TREE] == CLOSED:
            return False
        if offsets[i + 1] < offsets[i]:
            return False
    for token in tokens:  # noqa: SIM110 - compiled
        if token < 0:
            return False
    return True


@kernel
def lacking(state: LongArray, trees: LongArray, tree: int, blocks: int, prompt_blocks: int) -> int:
    """Return DONE if a tree may take `blocks` more, else the code of the limit that forbids it."""
    state[NEEDED] = blocks
    if trees[tree, BLOCKS] + blocks > prompt_blocks:
        return TREE_FULL
    if state[LIVE] + blocks > state[LIMIT]:
        return NEED_BLOCKS
    return DONE


@kernel
def prepare(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    cursors: LongArray,
    ring: IntArray,
    row: int,
    min_match: int,
    prompt_blocks: int,
    grow: bool,
) -> int:
    """Ensure that one more token of `row` can be stored and indexed; return a code."""
    tree = cursors[row, TREE]
    if cursors[row, OWN] == 0:
        code = lacking(state, trees, tree, 1 if trees[tree, ROOT] else 2, prompt_blocks)
        if code != DONE:
            return code
        if trees[tree, ROOT] == 0:
            make_index(arena, state, trees, tree, SMALLEST_LOG2)
        first = begin_sequence(arena, state, trees, tree, ring, cursors[row, RING_AT])
        cursors[row, OWN] = first
        cursors[row, END] = first + HEADER + len(ring) - 1
        link_position(
            arena, trees, tree, cursors[row, END], cursors[row, HASH_SHORT], cursors[row, HASH_LONG]
        )
    log2 = trees[tree, LOG2]
    if grow and trees[tree, POSITIONS] >= (2 << log2) and log2 < LARGEST_LOG2:
        more = index_blocks(log2 + 1) - index_blocks(log2)
        code = lacking(state, trees, tree, more, prompt_blocks)
        if code != DONE:
            return code
        rebuild_index(arena, state, trees, tree, log2 + 1, min_match, len(ring))
    if arena[(cursors[row, END] & -BLOCK) + USED] == SPAN:
        return lacking(state, trees, tree, 1, prompt_blocks)
    return DONE


@kernel
def extend(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    cursors: LongArray,
    rings: IntArray,
    rows: IntArray,
    tokens: IntArray,
    offsets: IntArray,
    min_match: int,
    prompt_blocks: int,
    grow: bool,
    experience: Experience,
    learning: bool,
) -> int:
    """Append rows' tokens; return a code.

    Without room it stops at state[AT_ROW], state[AT_TOKEN], with the blocks it needs in
    state[NEEDED]. Called again with the same arguments, it resumes from there. Row i of `[B]` rows
    appends tokens[offsets[i] : offsets[i+1]]. A tree has at most `prompt_blocks` blocks. If `grow`,
    an index is enlarged when its chains become long. If `learning`, the last drafts' outcomes are
    counted.
    """
    tested = 0
    max_match = rings.shape[1]
    scale_short = power_of_base(min_match - 1)
    scale_long = power_of_base(max_match - 1)
    while state[AT_ROW] < len(rows):
        at_row = state[AT_ROW]
        row = rows[at_row]
        tree = cursors[row, TREE]
        ring = rings[row]
        at = cursors[row, RING_AT]
        short = cursors[row, HASH_SHORT]
        long = cursors[row, HASH_LONG]
        stored = tree >= 0 and cursors[row, OWN] != MUTED
        if learning and experience.waiting[row] and offsets[at_row + 1] > offsets[at_row]:
            tested += learn(experience, row, tokens, offsets[at_row], offsets[at_row + 1])
        for index in range(max(offsets[at_row], state[AT_TOKEN]), offsets[at_row + 1]):
            if stored:
                # Only `prepare` reads the cursor, which is up to date before each call.
                code = prepare(
                    arena, state, trees, cursors, ring, row, min_match, prompt_blocks, grow
                )
                if code != DONE:
                    state[AT_TOKEN] = index
                    return code
            token = tokens[index]
            leaving = ring[(at - min_match) % max_match]
            short = roll_hash(short, leaving, token, scale_short)
            long = roll_hash(long, ring[at], token, scale_long)
            ring[at] = token
            at = at + 1 if at + 1 < max_match else 0
            cursors[row, RING_AT] = at
            cursors[row, HASH_SHORT] = short
            cursors[row, HASH_LONG] = long
            if stored:
                end = append_token(arena, state, trees, tree, cursors[row, END], token)
                cursors[row, END] = end
                link_position(arena, trees, tree, end, short, long)
            elif tree >= 0:
                state[REFUSED] += 1
        state[AT_ROW] += 1
        state[AT_TOKEN] = 0
    if tested:
        revise(experience)
    return DONE
