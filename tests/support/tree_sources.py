"""Fake draft sources: trees with the right tokens among wrong ones, random trees, invalid trees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.rollout.trajectory import IntArray


class _Source:
    """Keeps each row's key and its tokens; subclasses draft a tree for one row."""

    def __init__(self) -> None:
        self._keys: dict[int, str] = {}
        self._tokens: dict[int, list[int]] = {}
        self.opened = 0

    def open(self, key: str, context: IntArray) -> int:
        self.opened += 1
        self._keys[self.opened] = key
        self._tokens[self.opened] = []
        return self.opened

    def close(self, row: int) -> None:
        del self._keys[row], self._tokens[row]

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
            self._tokens[int(row)] += tokens[start:end].tolist()

    def advance(self, policy_version: int) -> None: ...

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        tokens: list[int] = []
        parents: list[int] = []
        offsets = [0]
        for row, budget in zip(rows, budgets, strict=True):
            for token, parent in self._draft_row(int(row), int(budget)):
                tokens.append(token)
                parents.append(parent)
            offsets.append(len(tokens))
        order = np.concatenate([np.arange(n) for n in np.diff(offsets)]) if len(rows) else []
        return Drafts(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(offsets, np.int32),
            (0.97 ** np.asarray(order)).astype(np.float32),
        )

    def _draft_row(self, row: int, budget: int) -> list[tuple[int, int]]:
        raise NotImplementedError


class OracleTrees(_Source):
    """Drafts the tokens that each key's request will generate, each after a wrong sibling.

    The accepted path is then never the first one, so its KV always has to be moved.
    """

    def __init__(self, texts: dict[str, list[int]], vocab: int) -> None:
        super().__init__()
        self._texts = texts
        self._vocab = vocab

    def _draft_row(self, row: int, budget: int) -> list[tuple[int, int]]:
        at = len(self._tokens[row])
        nodes: list[tuple[int, int]] = []
        parent = -1
        for right in self._texts[self._keys[row]][at:]:
            if len(nodes) + 2 > budget:
                break
            nodes.append(((right + 1) % self._vocab, parent))
            nodes.append((right, parent))
            parent = len(nodes) - 1
        return nodes


class RandomTrees(_Source):
    """Random valid trees of random sizes, with distinct siblings."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        super().__init__()
        self._vocab = vocab
        self.rng = np.random.default_rng(seed)

    def _draft_row(self, row: int, budget: int) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        for _ in range(int(self.rng.integers(0, budget + 1))):
            node = (int(self.rng.integers(self._vocab)), int(self.rng.integers(-1, len(nodes))))
            if node not in nodes:
                nodes.append(node)
        return nodes


class CorruptTrees(RandomTrees):
    """Invalid trees: parents after their nodes, equal siblings, impossible token ids."""

    def _draft_row(self, row: int, budget: int) -> list[tuple[int, int]]:
        size = int(self.rng.integers(0, budget + 1))
        tokens: NDArray[np.integer] = self.rng.choice([-5, 0, 1, 2, 3, 10**9], size)
        parents = self.rng.integers(-3, size + 2, size)
        return [(int(t), int(p)) for t, p in zip(tokens, parents, strict=True)]
