"""Writing accepted tokens into the trees, while their rollouts run."""

from __future__ import annotations

from cache.estimate import Experience, learn, revise
from cache.jit import kernel
from cache.store import (
    AT_ROW,
    AT_TOKEN,
    BLOCK,
    BLOCKS,
    DONE,
    END,
    HASH_LONG,
    HASH_SHORT,
    HEADER,
    LARGEST_LOG2,
    LIMIT,
    LIVE,
    LOG2,
    MUTED,
    NEED_BLOCKS,
    NEEDED,
    OWN,
    POSITIONS,
    REFUSED,
    RING_AT,
    ROOT,
    SMALLEST_LOG2,
    SPAN,
    TREE,
    TREE_FULL,
    USED,
    LongArray,
    append,
    begin,
    hang,
    index_blocks,
    make_index,
    power,
    rebuild,
    roll,
)
from rollout.trajectory import IntArray


@kernel
def lacking(state: LongArray, trees: LongArray, tree: int, blocks: int, prompt_blocks: int) -> int:
    """DONE when a tree may take `blocks` more, else what stands against it."""
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
    """Make sure that one more token of `row` can be written and indexed."""
    tree = cursors[row, TREE]
    if cursors[row, OWN] == 0:
        code = lacking(state, trees, tree, 1 if trees[tree, ROOT] else 2, prompt_blocks)
        if code != DONE:
            return code
        if trees[tree, ROOT] == 0:
            make_index(arena, state, trees, tree, SMALLEST_LOG2)
        first = begin(arena, state, trees, tree, ring, cursors[row, RING_AT])
        cursors[row, OWN] = first
        cursors[row, END] = first + HEADER + len(ring) - 1
        hang(
            arena, trees, tree, cursors[row, END], cursors[row, HASH_SHORT], cursors[row, HASH_LONG]
        )
    log2 = trees[tree, LOG2]
    if grow and trees[tree, POSITIONS] >= (2 << log2) and log2 < LARGEST_LOG2:
        more = index_blocks(log2 + 1) - index_blocks(log2)
        code = lacking(state, trees, tree, more, prompt_blocks)
        if code != DONE:
            return code
        rebuild(arena, state, trees, tree, log2 + 1, min_match, len(ring))
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
    """Append rows' tokens; stops where there is no room, at state[AT_ROW], state[AT_TOKEN].

    Called again with the same arguments it goes on from there.
    """
    tested = 0
    max_match = rings.shape[1]
    scale_short = power(min_match - 1)
    scale_long = power(max_match - 1)
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
                # Only `prepare` reads the cursor, so it is up to date before each call.
                code = prepare(
                    arena, state, trees, cursors, ring, row, min_match, prompt_blocks, grow
                )
                if code != DONE:
                    state[AT_TOKEN] = index
                    return code
            token = tokens[index]
            leaving = ring[(at - min_match) % max_match]
            short = roll(short, leaving, token, scale_short)
            long = roll(long, ring[at], token, scale_long)
            ring[at] = token
            at = at + 1 if at + 1 < max_match else 0
            cursors[row, RING_AT] = at
            cursors[row, HASH_SHORT] = short
            cursors[row, HASH_LONG] = long
            if stored:
                end = append(arena, state, trees, tree, cursors[row, END], token)
                cursors[row, END] = end
                hang(arena, trees, tree, end, short, long)
            elif tree >= 0:
                state[REFUSED] += 1
        state[AT_ROW] += 1
        state[AT_TOKEN] = 0
    if tested:
        revise(experience)
    return DONE
