"""Token trees against chains in the torch engine, under one node budget, at batch 8.

Both draft from caches of the same kind, filled with the same epoch 1, for the same prompts and
seeds. Both feed as many nodes per row and step as the budget allows, at any cost: the planner is
replaced by a fixed budget, because it would feed fewer nodes of a chain. The model is the trained
one, unchanged: acceptance does not depend on its width.
"""

from __future__ import annotations

import asyncio
from unittest import mock

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.remote.worker.drafting import FixedBudget
from benchmarks.rollout.contestants import CHAIN, OURS, Contestant, with_torch
from benchmarks.rollout.passes import Bench, Plan, Workload

ROWS = 8
BUDGETS = (16, 32, 64, 127)
"""Nodes per row. The one that counts is 32: with 8 rows it makes 264 tokens per forward pass, about
where a GPU stops waiting for memory. The others show the trend."""


def tree_and_chain(
    work: Workload, config: EngineConfig, repeats: int, budget: int
) -> tuple[float, float]:
    """Accepted drafts per forward pass of chain and tree, with `budget` nodes per row.

    The engines are created and closed here.
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
    with mock.patch("asyncrl.engine.torch.core.DraftPlanner", FixedBudget):
        found = asyncio.run(Bench(both, work, plan).run())
    at = found.rows[ROWS]
    chain, tree = (at.drafting(name)["accepted_per_step"] for name in (CHAIN, OURS))
    return chain, tree
