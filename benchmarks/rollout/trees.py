"""Token trees against chains in the torch engine, under one node budget, at batch 8.

Both draft from caches of the same kind, filled with the same epoch 1, for the same prompts and
seeds, and feed as many nodes per row and step as the budget allows, whatever that costs (the
planner, which would feed fewer to a chain, is left out). The model is the trained one as it is:
what is accepted does not depend on how wide it is.
"""

from __future__ import annotations

import asyncio
from unittest import mock

import numpy as np

from benchmarks.rollout.contestants import CHAIN, OURS, Contestant, with_torch
from benchmarks.rollout.passes import Bench, Plan, Workload
from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.drafting.planner import DraftPlanner
from engine.factory import create_engine
from rollout.trajectory import FloatArray, IntArray

ROWS = 8
BUDGETS = (16, 32, 64, 127)
"""Nodes per row. 32 counts: with 8 rows 264 tokens a forward, about where a GPU stops waiting for
memory (shared/FACTS.md). The others show which way it goes."""


class FixedBudget(DraftPlanner):
    """Feeds everything that the cache proposes, up to `max_draft_tokens` per row."""

    def __init__(self, *, max_step_tokens: int, max_draft_tokens: int) -> None:
        super().__init__(max_step_tokens=max_step_tokens, max_draft_tokens=max_draft_tokens)
        self._each = max_draft_tokens

    def ask(self, left: IntArray, **_of_the_step: int) -> tuple[IntArray, float]:
        """As many as allowed, however improbable."""
        return np.clip(left - 1, 0, self._each).astype(np.int32), 0.0

    def choose(
        self, _path_probabilities: FloatArray, offsets: IntArray, **_of_the_step: int
    ) -> IntArray:
        """All of them."""
        return np.diff(offsets).astype(np.int32)


def tree_and_chain(
    work: Workload, config: EngineConfig, repeats: int, budget: int
) -> tuple[float, float]:
    """Accepted drafts per forward pass of chain and tree, with so many nodes per row.

    The engines are made and closed here.

    Raises:
        EngineError: as `Bench.run`.
    """
    cache = CacheConfig(max_draft_tokens=budget, min_probability=0.0)
    both = [
        Contestant(
            name,
            create_engine(
                with_torch(config, draft_trees=name == OURS),
                str(work.earlier),
                cache_config=cache,
                seed=0,
            ),
            remembers=True,
        )
        for name in (CHAIN, OURS)
    ]
    plan = Plan(rows=(ROWS,), repeats=repeats, step_rows=(), overhead_repeats=0)
    with mock.patch("engine.torch.core.DraftPlanner", FixedBudget):
        found = asyncio.run(Bench(both, work, plan).run())
    at = found.rows[ROWS]
    chain, tree = (at.drafting(name)["accepted_per_step"] for name in (CHAIN, OURS))
    return chain, tree
