"""Stored rollouts: appended to while their requests run, dropped, and copied for other processes.

A stored rollout is its *head* (the `max_match` tokens before the response; -1 if the context was
shorter) followed by the response.
"""

from dataclasses import dataclass

from asyncrl.cache.tree.arena import (
    AT_ROW,
    AT_TOKEN,
    BLOCK,
    BLOCKS,
    CLOSED,
    END,
    FIRST,
    HASH_LONG,
    HASH_SHORT,
    HEADER,
    LARGEST_LOG2,
    LAST,
    LIMIT,
    LIVE,
    LOG2,
    MUTED,
    NEEDED,
    NEXT,
    OWN,
    POLICY_VERSION,
    POSITIONS,
    PREV,
    REFUSED,
    RING_AT,
    ROOT,
    SEQ_NEXT,
    SEQ_OPEN,
    SEQUENCE,
    SEQUENCES,
    SMALLEST_LOG2,
    SPAN,
    START,
    TOKENS,
    TREE,
    USED,
    VERSION,
    LongArray,
    allocate,
    drop_index,
    index_blocks,
    link_position,
    make_index,
    power_of_base,
    rebuild_index,
    release,
    roll_hash,
)
from asyncrl.cache.tree.estimate import Experience, learn, revise
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")

DONE, NEED_BLOCKS, TREE_FULL = 0, 1, 2
"""Codes of `extend`: finished; too few free blocks in the arena; the tree is at its limit."""


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
