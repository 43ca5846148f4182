"""A learning rate that is ordered while a run trains, against one that was scheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.wire.weights.fingerprint import fingerprint


def test_a_learning_rate_that_is_changed_equals_one_that_was_scheduled(
    model_path: Callable[[str], str], group_of: Callable[..., Any]
) -> None:
    """Bit for bit, with warm-up and decay around it; and it is not that of the unchanged run."""
    config = TrainerConfig(
        dtype="float64",
        learning_rate=1e-3,
        device="cpu",
        warmup_steps=1,
        learning_rate_schedule="cosine",
        schedule_steps=9,
    )
    path = model_path("qwen3")

    def train(
        peaks: dict[int, float], later: dict[int, float] | None = None
    ) -> tuple[str, list[float]]:
        learner = Learner(config, path, group_size=4, seed=1)
        learner.peak_rates = peaks
        rates = []
        for step in range(4):
            if step == 2 and later is not None:
                learner.peak_rates = later
            rng = np.random.default_rng(step)
            for index in range(2):
                rewards = rng.normal(size=4).astype(np.float32)
                learner.add_group(group_of(index, rng, version=step), rewards)
            rates.append(learner.step().learning.learning_rate)
        return fingerprint(learner.tensors()).whole, rates

    scheduled, rates = train({2: 3e-4, 3: 5e-4})
    assert train({}, {2: 3e-4, 3: 5e-4}) == (scheduled, rates)
    plain, unchanged = train({})
    assert plain != scheduled
    assert rates[:2] == unchanged[:2]
    assert rates[2] == pytest.approx(0.3 * unchanged[2])
    assert rates[3] == pytest.approx(0.5 * unchanged[3])
