"""The trees of all prompts, the byte budget that they share, and the arena's integrity check."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.config import CacheConfig, TreeRules
from asyncrl.cache.errors import CacheCorrupt
from asyncrl.cache.tree import arena, sequences, stored
from asyncrl.cache.tree.arena import (
    BLOCK,
    BLOCKS,
    BUMP,
    FIRST,
    FREE,
    FREE_HEAD,
    HEADER,
    LAST,
    LIVE,
    LOG2,
    NEXT,
    POSITIONS,
    PREV,
    ROOT,
    SEQ_NEXT,
    SEQUENCE,
    SEQUENCES,
    SPAN,
    START,
    TOKENS,
    USED,
    VERSION,
    LongArray,
)
from asyncrl.cache.tree.index import bucket, depth_of, hash_back, node_at
from asyncrl.cache.tree.stored import StoredRollouts
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("cache/tree")

PROBLEMS = (
    "",
    "live and free blocks do not add up to the allocated ones",
    "a free block is linked twice or outside the arena",
    "the free list's length is not its counter",
    "a block of a sequence is linked twice or outside the arena",
    "the blocks of a sequence are inconsistent",
    "a block of an index is linked twice or outside the arena",
    "a tree's block count is wrong",
    "a tree's list of sequences does not end where it should",
    "a chain leaves its tree, is in the wrong bucket or is circular",
    "the chains of a tree do not contain each of its positions once",
    "the count of live blocks is wrong",
    "the count of cached tokens or sequences is wrong",
)

Owners = NDArray[np.int32]


@kernel
def claim(owners: Owners, block: int, bump: int, owner: int) -> bool:
    """Record a block's owner; return False if it has one or is not a block."""
    if block < BLOCK or block >= bump or block % BLOCK or owners[block // BLOCK]:
        return False
    owners[block // BLOCK] = owner
    return True


@kernel
def check_free(arena: IntArray, state: LongArray, owners: Owners) -> int:
    """Claim the free list; return a problem's number or 0."""
    if state[LIVE] + state[FREE] != state[BUMP] // BLOCK - 1:
        return 1
    block = state[FREE_HEAD]
    seen = 0
    while block:
        if not claim(owners, block, state[BUMP], -1):
            return 2
        seen += 1
        block = arena[block]
    return 0 if seen == state[FREE] else 3


@kernel
def check_sequence(
    arena: IntArray, state: LongArray, owners: Owners, first: int, owner: int, max_match: int
) -> tuple[int, int, int]:
    """Claim a sequence's blocks; return problem, blocks, tokens (including its head)."""
    blocks = 0
    tokens = 0
    former = 0
    block = first
    while block:
        if not claim(owners, block, state[BUMP], owner):
            return 4, 0, 0
        used = arena[block + USED]
        if (
            arena[block + PREV] != former
            or arena[block + SEQUENCE] != first
            or arena[block + VERSION] < 0
            or arena[block + START] != tokens - max_match
            or used < 1
            or used > SPAN
            or (arena[block + NEXT] and used < SPAN)
        ):
            return 5, 0, 0
        blocks += 1
        tokens += used
        former = block
        block = arena[block + NEXT]
    return 0, blocks, tokens


@kernel
def check_chains(
    arena: IntArray,
    trees: LongArray,
    tree: int,
    owners: Owners,
    chain: int,
    length: int,
) -> int:
    """Check the short or the long chains of a tree; return a problem's number or 0."""
    root = trees[tree, ROOT]
    log2 = trees[tree, LOG2]
    depth = depth_of(log2)
    seen = 0
    for word in range(chain, 2 << log2, 2):
        slot = node_at(arena, root, depth, 0, word >> 7) + (word & 127)
        position = int(arena[slot])
        while position:
            block = position & -BLOCK
            offset = position - block - HEADER
            if (
                position < 0
                or position >= len(arena)
                or owners[block // BLOCK] != tree + 1
                or offset < 0
                or offset >= arena[block + USED]
                or seen > trees[tree, POSITIONS]
                or bucket(arena, root, log2, hash_back(arena, position, length), chain) != slot
            ):
                return 9
            seen += 1
            position = int(arena[position + (chain + 1) * SPAN])
    return 0 if seen == trees[tree, POSITIONS] else 10


@kernel
def check_index(
    arena: IntArray, state: LongArray, trees: LongArray, tree: int, owners: Owners
) -> int:
    """Claim the blocks of a tree's index; return their number, or -1 if one is not a block."""
    root = trees[tree, ROOT]
    if root == 0:
        return 0
    depth = depth_of(trees[tree, LOG2])
    nodes = max(1, (2 << trees[tree, LOG2]) // BLOCK)
    total = 0
    # From the root down: a node is followed only after it was verified to be a block.
    for level in range(depth, -1, -1):
        count = (nodes + (1 << (7 * level)) - 1) >> (7 * level)
        for item in range(count):
            # Not the number of a sequence's owner, so that a chain into an index is detected.
            if not claim(owners, node_at(arena, root, depth, level, item), state[BUMP], -tree - 2):
                return -1
        total += count
    return total


@kernel
def check_tree(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    tree: int,
    owners: Owners,
    min_match: int,
    max_match: int,
) -> tuple[int, int, int]:
    """Verify one tree; return problem, sequences, response tokens."""
    blocks = 0
    tokens = 0
    sequences = 0
    last = 0
    first = trees[tree, FIRST]
    while first:
        problem, more, length = check_sequence(arena, state, owners, first, tree + 1, max_match)
        if problem:
            return problem, 0, 0
        blocks += more
        tokens += length - max_match
        sequences += 1
        last = first
        first = arena[first + SEQ_NEXT]
    if last != trees[tree, LAST]:
        return 8, 0, 0
    more = check_index(arena, state, trees, tree, owners)
    if more < 0:
        return 6, 0, 0
    if blocks + more != trees[tree, BLOCKS]:
        return 7, 0, 0
    if trees[tree, POSITIONS] != tokens + sequences:
        return 10, 0, 0
    problem = 0
    if more:
        problem = check_chains(arena, trees, tree, owners, 0, min_match)
        if problem == 0:
            problem = check_chains(arena, trees, tree, owners, 1, max_match)
    return problem, sequences, tokens


@kernel
def check(
    arena: IntArray,
    state: LongArray,
    trees: LongArray,
    used: IntArray,
    min_match: int,
    max_match: int,
) -> int:
    """Verify all existing trees `used` `[T]`; return an index into PROBLEMS, 0 if none."""
    owners = np.zeros(state[BUMP] // BLOCK, np.int32)
    problem = check_free(arena, state, owners)
    if problem:
        return problem
    blocks = 0
    tokens = 0
    sequences = 0
    for tree in used:
        problem, more_sequences, more_tokens = check_tree(
            arena, state, trees, tree, owners, min_match, max_match
        )
        if problem:
            return problem
        blocks += trees[tree, BLOCKS]
        tokens += more_tokens
        sequences += more_sequences
    if blocks != state[LIVE]:
        return 11
    return 0 if tokens == state[TOKENS] and sequences == state[SEQUENCES] else 12


BLOCK_BYTES = 4 * arena.BLOCK
TREE_BYTES = 512
"""Charged for each tree in addition to its blocks: its line in `trees` and its key's entry."""


class Forest:
    """The arena, the tree of each prompt in it, and eviction.

    A tree is named by its line in `trees`. The least recently used prompts without open rows are
    dropped first, then the oldest rollouts of prompts in use.
    """

    def __init__(self, config: CacheConfig, rules: TreeRules) -> None:
        self._config, self._rules = config, rules
        blocks = config.max_bytes // BLOCK_BYTES if config.enabled else 0
        # Only reserved: the system provides a page when a block in it is first used.
        self.arena: IntArray = np.empty((blocks + 1) * arena.BLOCK, np.int32)
        self.state: LongArray = np.zeros(arena.STATE_WORDS, np.int64)
        self.state[arena.BUMP] = arena.BLOCK
        self.state[arena.LIMIT] = blocks
        self.trees: LongArray = np.zeros((16, arena.TREE_WORDS), np.int64)
        self.prompt_blocks = min(rules.bytes_per_prompt, config.max_bytes) // BLOCK_BYTES
        """Most blocks of one tree."""
        self.evicted_tokens = 0
        """Counter: response tokens dropped to stay within a budget."""
        self._free_trees: list[int] = list(range(15, -1, -1))
        self._keys: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._key_of: dict[int, str] = {}
        self._open_rows: dict[int, int] = {}  # tree: number of open rows, if any
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def bytes(self) -> int:
        """Bytes that all trees take."""
        return int(self.state[arena.LIVE]) * BLOCK_BYTES + self._overhead()

    def tree_of(self, key: str) -> int:
        """Return the tree of a key, made if it is new; DETACHED if there is not enough room."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return self._keys[key]
        cost = TREE_BYTES + _key_bytes(key)
        while self.bytes + cost > self._config.max_bytes:
            if not self.make_room(1):
                return arena.DETACHED
        if not self._free_trees:
            size = len(self.trees)
            self.trees = np.concatenate([self.trees, np.zeros_like(self.trees)])
            self._free_trees = list(range(2 * size - 1, size - 1, -1))
        tree = self._free_trees.pop()
        self.trees[tree] = 0
        self._keys[key] = tree
        self._key_of[tree] = key
        self._key_bytes += _key_bytes(key)
        self._set_limit()
        return tree

    def row_opened(self, tree: int) -> None:
        """Note that a row of this tree was opened, which keeps the tree until it is closed."""
        self._open_rows[tree] = self._open_rows.get(tree, 0) + 1

    def row_closed(self, tree: int) -> None:
        """Note that a row was closed; a tree without rows and rollouts is dropped."""
        self._open_rows[tree] -= 1
        if not self._open_rows[tree]:
            del self._open_rows[tree]
            key = self._key_of[tree]
            self._keys.move_to_end(key)
            if not self.trees[tree, arena.FIRST]:
                self._drop(key)

    def make_room(self, blocks: int) -> bool:
        """Free at least `blocks`, and some more so that this is rare; False if none was freed."""
        state = self.state
        goal = state[arena.LIMIT] - max(blocks, state[arena.LIMIT] // 32)
        before = self.bytes
        for key in list(self._keys):
            if state[arena.LIVE] <= goal:
                break
            if self._keys[key] not in self._open_rows:
                self._drop(key)
                goal = state[arena.LIMIT] - max(blocks, state[arena.LIMIT] // 32)
        for tree in list(self._keys.values()):  # all in use: drop their oldest rollouts
            if state[arena.LIVE] <= goal:
                break
            self.trim(tree, int(self.trees[tree, arena.BLOCKS]) // 2)
        return self.bytes < before

    def trim(self, tree: int, target: int) -> bool:
        """Drop oldest finished rollouts to at most `target` blocks; False if none was dropped."""
        dropped = sequences.trim_tree(
            self.arena, self.state, self.trees, tree, target,
            self._config.min_match, self._rules.max_match,
        )  # fmt: skip
        self.evicted_tokens += max(0, dropped)
        return dropped >= 0

    def rollout(self, tree: int, first: int) -> StoredRollouts:
        """Copy the tree's sequence named `first`, finished or not."""
        tokens = np.empty(stored.length(self.arena, first), np.int32)
        length, version = stored.copy(self.arena, first, tokens)
        one = np.array([[length], [version]], np.int32)
        return StoredRollouts(self._key_of[tree], one[0], one[1], tokens)

    def finished_rollouts(self) -> Iterator[StoredRollouts]:
        """Yield copies of all finished sequences, the least recently used prompt first."""
        for key, tree in self._keys.items():
            sequences, total = stored.count(self.arena, self.trees, tree)
            if sequences:
                lengths, versions = np.empty((2, sequences), np.int32)
                tokens = np.empty(total, np.int32)
                stored.finished(self.arena, self.trees, tree, lengths, versions, tokens)
                yield StoredRollouts(key, lengths, versions, tokens)

    def check(self) -> None:
        """Verify all links, counters and budgets, or raise CacheCorrupt; reads everything."""
        used = np.array(sorted(self._keys.values()), np.int32)
        problem = check(
            self.arena, self.state, self.trees, used,
            self._config.min_match, self._rules.max_match,
        )  # fmt: skip
        if problem:
            raise CacheCorrupt(PROBLEMS[problem])
        if self.bytes > self._config.max_bytes and self.state[arena.LIVE]:
            raise CacheCorrupt(f"{self.bytes} bytes are above {self._config.max_bytes}")

    def _drop(self, key: str) -> None:
        """Drop a prompt that has no open rows."""
        tree = self._keys.pop(key)
        self.trim(tree, 0)
        del self._key_of[tree]
        self._free_trees.append(tree)
        self._key_bytes -= _key_bytes(key)
        self._set_limit()

    def _overhead(self) -> int:
        return len(self._keys) * TREE_BYTES + self._key_bytes

    def _set_limit(self) -> None:
        blocks = (self._config.max_bytes - self._overhead()) // BLOCK_BYTES
        self.state[arena.LIMIT] = max(0, blocks)


def _key_bytes(key: str) -> int:
    return 4 * len(key)  # at most, as Python stores it
