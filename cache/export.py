"""Reading stored rollouts back out, oldest first: for snapshots and for other processes.

A stored sequence is its *head* (the `max_match` tokens before the response; -1 where the context
was shorter) and the response. Nothing here changes the arena.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.jit import kernel
from cache.store import FIRST, HEADER, NEXT, SEQ_NEXT, SEQ_OPEN, USED, VERSION, LongArray
from rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class Stored:
    """Rollouts of one prompt, oldest first, as they lie in the cache."""

    key: str
    lengths: IntArray
    """`[S]` tokens of each rollout, its head included; more than the head's."""
    versions: IntArray
    """`[S]` policy version that wrote its end."""
    tokens: IntArray
    """`[N]` rollout after rollout: head, then response."""


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
def copy(arena: IntArray, first: int, out: IntArray) -> tuple[int, int]:
    """Write a sequence, head first, to the front of `out`; returns its tokens and its version."""
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
