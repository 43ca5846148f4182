"""Reading stored rollouts back out, oldest first: for snapshots and for other processes.

A stored sequence is its *head* (the `max_match` tokens before the response; -1 where the context
was shorter) and the response. Nothing here changes the arena.
"""

from __future__ import annotations

from cache.jit import kernel
from cache.store import FIRST, HEADER, NEXT, SEQ_NEXT, SEQ_OPEN, USED, LongArray
from cache.trajectory import IntArray


@kernel
def length(arena: IntArray, first: int) -> int:
    """Tokens of a sequence, its head included."""
    tokens = 0
    block = first
    while block:
        tokens += arena[block + USED]
        block = arena[block + NEXT]
    return tokens


@kernel
def copy(arena: IntArray, first: int, out: IntArray) -> int:
    """Write a sequence's tokens, head first, to the front of `out`; returns how many."""
    at = 0
    block = first
    while block:
        for word in range(block + HEADER, block + HEADER + arena[block + USED]):
            out[at] = arena[word]
            at += 1
        block = arena[block + NEXT]
    return at


@kernel
def count(arena: IntArray, trees: LongArray, tree: int) -> tuple[int, int]:
    """Finished sequences of a tree, and their tokens, heads included."""
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
    arena: IntArray, trees: LongArray, tree: int, tokens: IntArray, lengths: IntArray
) -> None:
    """Fill `tokens` and `lengths`, of the sizes that `count` gave, oldest sequence first."""
    at = 0
    item = 0
    first = trees[tree, FIRST]
    while first:
        if not arena[first + SEQ_OPEN]:
            taken = copy(arena, first, tokens[at:])
            lengths[item] = taken
            at += taken
            item += 1
        first = arena[first + SEQ_NEXT]
