"""Storing accepted tokens in the trees while their requests run."""

from __future__ import annotations

from asyncrl.cache.tree.arena import (
    AT_ROW,
    AT_TOKEN,
    BLOCK,
    BLOCKS,
    CLOSED,
    END,
    HASH_LONG,
    HASH_SHORT,
    HEADER,
    LIMIT,
    LIVE,
    LOG2,
    MUTED,
    NEEDED,
    OWN,
    POSITIONS,
    REFUSED,
    RING_AT,
    ROOT,
    SPAN,
    TREE,
    USED,
    LongArray,
)
from asyncrl.cache.tree.estimate import Experience, learn, revise
from asyncrl.cache.tree.index import (
    LARGEST_LOG2,
    SMALLEST_LOG2,
    index_blocks,
    link_position,
    make_index,
    power_of_base,
    rebuild_index,
    roll_hash,
)
from asyncrl.cache.tree.sequences import append_token, begin_sequence
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")

DONE, NEED_BLOCKS, TREE_FULL = 0, 1, 2
"""Codes of `extend`: finished; too few free blocks in the arena; the tree is at its limit."""


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
