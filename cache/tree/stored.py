"""Stored rollouts outside the arena, for snapshots and other processes.

A stored rollout is its *head* (the `max_match` tokens before the response; -1 if the context was
shorter) followed by the response. The kernels here read the arena and never change it.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.cache.tree.arena import (
    FIRST,
    HEADER,
    NEXT,
    SEQ_NEXT,
    SEQ_OPEN,
    USED,
    VERSION,
    LongArray,
)
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")


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
