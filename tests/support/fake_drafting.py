"""Fakes around the drafting inside vLLM: a source of drafts and a planner that remember."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.engine.drafting.planner import DraftPlanner
from asyncrl.rollout.trajectory import FloatArray, IntArray

STOP = 7


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


@dataclass
class FakeSource:
    """Writes down what it is told and drafts 90, 91, ... for everyone."""

    told: dict[int, list[int]] = field(default_factory=dict)
    opened: list[tuple[str, list[int]]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def open(self, key: str, context: IntArray) -> int:
        self.opened.append((key, context.tolist()))
        self.told[len(self.opened)] = []
        return len(self.opened)

    def close(self, row: int) -> None:
        self.closed.append(row)

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        for i, row in enumerate(rows.tolist()):
            self.told[row] += tokens[offsets[i] : offsets[i + 1]].tolist()

    def advance(self, policy_version: int) -> None: ...

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        assert not branching
        assert len(rows) == len(budgets)
        offsets = np.concatenate([[0], np.cumsum(budgets)]).astype(np.int32)
        tokens = [90 + j for budget in budgets.tolist() for j in range(budget)]
        guesses = [0.5 ** (j + 1) for budget in budgets.tolist() for j in range(budget)]
        parents = [j - 1 for budget in budgets.tolist() for j in range(budget)]
        return Drafts(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            offsets,
            np.array(guesses, np.float32),
        )


class FixedPlanner(DraftPlanner):
    """Every row gets `most` tokens; remembers what it is told."""

    def __init__(self, most: int) -> None:
        super().__init__(max_step_tokens=1000, max_draft_tokens=most)
        self.most = most
        self.asked: list[tuple[list[int], int]] = []
        self.judged: list[tuple[list[float], list[bool]]] = []
        self.observed: list[tuple[int, int, int, float]] = []

    def ask(self, left: IntArray, *, other_tokens: int = 0) -> tuple[IntArray, float]:
        self.asked.append((left.tolist(), other_tokens))
        return np.minimum(left - 1, self.most).astype(np.int32), 0.0

    def choose(
        self,
        path_probabilities: FloatArray,
        offsets: IntArray,
        *,
        rows: int,
        other_tokens: int = 0,
        worth: NDArray[np.float64] | None = None,
    ) -> IntArray:
        assert len(offsets) == rows + 1
        assert worth is None or len(worth) == rows
        return np.diff(offsets).astype(np.int32)

    def judge(self, path_probabilities: FloatArray, accepted: NDArray[np.bool_]) -> None:
        self.judged.append((path_probabilities.tolist(), accepted.tolist()))

    def observe(self, *, tokens: int, rows: int, context: int, seconds: float) -> None:
        self.observed.append((tokens, rows, context, seconds))
