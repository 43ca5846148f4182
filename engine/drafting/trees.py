"""Token trees of a step: the drafts that decoding rows feed after their last token.

A row's last token is the root; a drafted token is a node below the token that it would follow. A
node attends to the row's context and its ancestors. Its KV has a separate place after the context;
acceptance moves the KV of the accepted path to the right places. In a chain, places and positions
agree, the mask is the plain one and nothing has to be moved.

    row's context  ... root     nodes      0: a    1: b (below a)    2: c (below the root)
    position       ... p        p + depth  p + 1   p + 2             p + 1
    place in slot  ... p        p + 1 + j  p + 1   p + 2             p + 3

The most probable path comes first: it is accepted most often, with its KV already in place.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

kernel = kernels_of("engine")

LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """Drafts as they are fed: valid trees, the most probable path of each row first."""

    tokens: IntArray
    """`[N]`"""
    parents: IntArray
    """`[N]` index within the row, always before the node; -1: the row's last token."""
    depths: IntArray
    """`[N]` 1 for a child of the row's last token."""
    offsets: IntArray
    """`[n+1]`"""
    path_probabilities: FloatArray
    """`[N]`"""
    counts: IntArray
    """`[n]` tokens that each row feeds: its last one and its nodes."""
    forked: bool

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.offsets) - 1

    def fed(self, of_root: IntArray, of_node: IntArray) -> IntArray:
        """Interleave `[n]` and `[N]` values in feeding order: each row's root, then its nodes."""
        n = self.rows
        if not len(of_node):
            return of_root
        out = np.empty(n + len(of_node), np.int32)
        out[self.offsets[:-1] + np.arange(n)] = of_root
        row = np.repeat(np.arange(n), np.diff(self.offsets))
        out[np.arange(len(of_node)) + row + 1] = of_node
        return out

    def hidden(self) -> tuple[LongArray, LongArray, LongArray]:
        """Return row, query and key of pairs on different paths that a causal mask lets through.

        Queries and keys count a row's fed tokens from its root, 0. Empty when nothing is forked.
        """
        counts = self.counts.astype(np.int64)
        pairs = int((counts * (counts - 1) // 2).sum()) if self.forked else 0
        out = np.empty((3, pairs), np.int64)
        found = _hidden(self.parents, self.offsets, out) if pairs else 0
        return out[0, :found], out[1, :found], out[2, :found]


def plant(drafts: Drafts, keep: IntArray, deepest: IntArray, vocab_size: int) -> TokenTrees:
    """Lay out the first `keep[i]` nodes of each row, down to a depth of `deepest[i]`, as trees.

    Tokens outside the vocabulary, parents that do not come before their node and second children
    with the same token are dropped with their descendants: a corrupt cache costs only time.
    """
    size = len(drafts.tokens)
    tokens, parents, depths = (np.empty(size, np.int32) for _ in range(3))
    probabilities = np.empty(size, np.float32)
    offsets = np.zeros(len(drafts.offsets), np.int32)
    scratch = np.empty((6, size + 1), np.int32)
    forked = _plant(
        drafts.tokens, drafts.parents, drafts.offsets, drafts.path_probabilities,
        keep.astype(np.int32), deepest.astype(np.int32), vocab_size,
        tokens, parents, depths, probabilities, offsets, scratch,
    )  # fmt: skip
    total = int(offsets[-1])
    return TokenTrees(
        tokens[:total],
        parents[:total],
        depths[:total],
        offsets,
        probabilities[:total],
        counts=offsets[1:] - offsets[:-1] + 1,
        forked=forked > 0,
    )


def no_trees(rows: int) -> TokenTrees:
    """Return empty trees of rows without drafts."""
    none = np.empty(0, np.int32)
    offsets = np.zeros(rows + 1, np.int32)
    one = np.ones(rows, np.int32)
    return TokenTrees(none, none, none, offsets, np.empty(0, np.float32), one, forked=False)


@kernel
def _among(tokens: IntArray, node: int, sibling: IntArray, token: int) -> bool:
    """Return True if a node or one of the siblings linked after it holds the token."""
    while node >= 0:
        if tokens[node] == token:
            return True
        node = sibling[node]
    return False


@kernel
def _plant(
    tokens: IntArray,
    parents: IntArray,
    offsets: IntArray,
    probabilities: FloatArray,
    keep: IntArray,
    deepest: IntArray,
    vocab_size: int,
    out_tokens: IntArray,
    out_parents: IntArray,
    out_depths: IntArray,
    out_probabilities: FloatArray,
    out_offsets: IntArray,
    scratch: IntArray,
) -> int:
    """Fill the `out_` arrays; return the number of forked rows."""
    first, sibling, main, place = scratch[0], scratch[1], scratch[2], scratch[3]
    valid, depth = scratch[4], scratch[5]
    forked = 0
    total = 0
    for row in range(len(offsets) - 1):
        begin = offsets[row]
        count = min(keep[row], offsets[row + 1] - begin)
        first[: count + 1] = -1  # first child of a node, the root at 0
        length = 0  # of the main path: first children of first children
        end = 0  # its last node, counted from the root
        for node in range(count):
            parent = parents[begin + node]
            token = tokens[begin + node]
            valid[node] = 0
            if not -1 <= parent < node or not 0 <= token < vocab_size:
                continue
            if parent >= 0 and not valid[parent]:
                continue
            depth[node] = depth[parent] + 1 if parent >= 0 else 1
            if depth[node] > deepest[row]:
                continue
            if _among(tokens[begin:], first[parent + 1], sibling, token):
                continue
            valid[node] = 1
            main[node] = 0
            if first[parent + 1] < 0 and parent + 1 == end:
                main[node] = 1
                end = node + 1
                place[node] = length
                length += 1
            sibling[node] = first[parent + 1]
            first[parent + 1] = node
        branched = length
        for node in range(count):
            if not valid[node]:
                continue
            if not main[node]:
                place[node] = branched
                branched += 1
            at = total + place[node]
            parent = parents[begin + node]
            out_tokens[at] = tokens[begin + node]
            out_parents[at] = place[parent] if parent >= 0 else -1
            out_depths[at] = depth[node]
            out_probabilities[at] = probabilities[begin + node]
        forked += branched > length
        total += branched
        out_offsets[row + 1] = total
    return forked


@kernel
def _hidden(parents: IntArray, offsets: IntArray, out: LongArray) -> int:
    """Fill `[3, M]` with row, query and key; return the number of pairs."""
    found = 0
    for row in range(len(offsets) - 1):
        begin = offsets[row]
        for node in range(offsets[row + 1] - begin):
            ancestor = parents[begin + node]
            for key in range(node - 1, -1, -1):
                if key == ancestor:
                    ancestor = parents[begin + key]
                else:
                    out[0, found] = row
                    out[1, found] = node + 1
                    out[2, found] = key + 1
                    found += 1
    return found
