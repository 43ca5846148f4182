"""The planner that fills steps up to a fixed number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.engine.remote.worker.drafting import FixedBudget


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 40])
@pytest.mark.parametrize("prompts", [0, 7])
def test_budgets_stay_within_the_step(rows: int, prompts: int) -> None:
    left = np.arange(1, rows + 1).astype(np.int32)
    planner = FixedBudget(max_step_tokens=32, max_draft_tokens=5)
    budgets, min_probability = planner.ask(left, other_tokens=prompts)
    assert min_probability == 0
    assert budgets.dtype == np.int32
    assert (budgets >= 0).all()
    assert (budgets <= np.minimum(left - 1, 5)).all()
    assert budgets.sum() + rows + prompts <= max(32, rows + prompts)
    if rows in (0, 40):
        assert not budgets.any()


def test_everything_proposed_is_fed() -> None:
    planner = FixedBudget(max_step_tokens=32, max_draft_tokens=5)
    offsets = np.array([0, 2, 2, 5], np.int32)
    assert planner.choose(np.full(5, 1e-9, np.float32), offsets, rows=3).tolist() == [2, 0, 3]
