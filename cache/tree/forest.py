"""The trees of all prompts, and the byte budget that they share."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from asyncrl.cache.config import CacheConfig, TreeRules
from asyncrl.cache.tree import arena
from asyncrl.cache.tree.arena import LongArray, StoredRollouts
from asyncrl.rollout.trajectory import IntArray

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
        dropped = arena.trim_tree(
            self.arena, self.state, self.trees, tree, target,
            self._config.min_match, self._rules.max_match,
        )  # fmt: skip
        self.evicted_tokens += max(0, dropped)
        return dropped >= 0

    def rollout(self, tree: int, first: int) -> StoredRollouts:
        """Copy the tree's sequence named `first`, finished or not."""
        tokens = np.empty(arena.length(self.arena, first), np.int32)
        length, version = arena.copy(self.arena, first, tokens)
        one = np.array([[length], [version]], np.int32)
        return StoredRollouts(self._key_of[tree], one[0], one[1], tokens)

    def finished_rollouts(self) -> Iterator[StoredRollouts]:
        """Yield copies of all finished sequences, the least recently used prompt first."""
        for key, tree in self._keys.items():
            count, total = arena.count(self.arena, self.trees, tree)
            if count:
                lengths, versions = np.empty((2, count), np.int32)
                tokens = np.empty(total, np.int32)
                arena.finished(self.arena, self.trees, tree, lengths, versions, tokens)
                yield StoredRollouts(key, lengths, versions, tokens)

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
