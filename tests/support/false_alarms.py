"""The suite's budget of false alarms, and checks that wrong samples would be seen.

A statistical test compares samples with what a right product would draw. It fails a right product
with some probability. All such tests together do so with probability SUITE at most: a p-value fails
below ALARM, and P_VALUES says how many each file judges at most, so that the sum of all shares is
at most SUITE (Bonferroni). `Claims` counts them and refuses more. Most seeds are fixed; then the
probability is that of a change which draws other samples.

A check of power needs no share: it fails, or says NOT JUDGED, where a wrong product passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from suite_outcome import not_judged

T = TypeVar("T")

SUITE = 1e-4
"""Probability that a right product fails any statistical test of one run of the suite, at most."""
ALARM = 1e-7
"""A right product has a p-value below this with this probability."""
SIGMAS = 5.33
"""A normal deviation is larger, to either side, with probability ALARM."""
P_VALUES = {
    "asyncrl/generator/test_turns_exactness.py": 18,
    "asyncrl/generator/test_held_out_samples.py": 1,
    "asyncrl/generator/test_whole_loop.py": 139,
    "asyncrl/generator/test_whole_loop_remote.py": 114,
    "asyncrl/run/test_two_runs.py": 2,
    "asyncrl/simulation/test_simulation.py": 14,
    "benchmarks/test_benchmarks_exactness.py": 110,
    "engine/remote/test_remote_engine.py": 4,
    "engine/remote/test_remote_kept.py": 4,
    "engine/remote/test_remote_kept_again.py": 4,
    "engine/remote/test_remote_turns.py": 6,
    "engine/sglang/test_sglang_drafts.py": 1,
    "engine/sglang/test_sglang_faults.py": 2,
    "engine/sglang/test_tree_drawing.py": 2,
    "engine/sampling/test_drawing.py": 16,
    "engine/sampling/test_truncation.py": 27,
    "engine/test_turns.py": 2,
    "engine/sampling/test_verification.py": 4,
    "engine/torch/test_torch_exactness.py": 14,
    "engine/torch/test_torch_fresh_numbers.py": 2,
    "engine/torch/test_torch_kept_exactness.py": 7,
    "engine/torch/test_torch_turns_exactness.py": 9,
    "rollout/test_acceptance.py": 1,
    "rollout/test_acceptance_kept_samples.py": 20,
    "rollout/test_acceptance_tree.py": 3,
    "scheduler/test_dynamic_selection.py": 4,
    "trainer/test_lora.py": 1,
}
"""The p-values that each file of tests judges in a run, at most. Its share is so many ALARMs."""

_TESTS = Path(__file__).parents[1]


class Claims:
    """The statistical statements of one file, which share its part of the budget.

    Args:
        file: `__file__` of the tests.
    """

    def __init__(self, file: str) -> None:
        self._file = str(Path(file).relative_to(_TESTS))
        self._left = P_VALUES[self._file]

    def fit(self, p_value: float) -> bool:
        """Judge a sample of the product. Each call takes one of the file's p-values."""
        self.take()
        return p_value > ALARM

    def sigmas(self) -> float:
        """Take one of the file's p-values for a sum: the deviation at which it fails."""
        self.take()
        return SIGMAS

    def take(self, p_values: int = 1) -> None:
        """Take so many of the file's p-values: more than one for a threshold above ALARM."""
        self._left -= p_values
        assert self._left >= 0, f"{self._file} judges more p-values than it has in P_VALUES"


def is_caught(p_value: float) -> bool:
    """Judge a sample of a wrong product: `Claims.fit` must not pass it."""
    return p_value < ALARM


def coincidence(again: int, chances: Sequence[float]) -> float:
    """Return the probability that so many or more of independent events happen.

    Args:
        again: how many did, such as draws that repeat old ones.
        chances: the probability of each.
    """
    distribution = np.ones(1)
    for chance in chances:
        distribution = np.convolve(distribution, [1 - chance, chance])
    return float(distribution[again:].sum())


def draw_until(
    item: pytest.Item, draw: Callable[[int], T], lacks: Callable[[list[T]], str], *, most: int
) -> list[T]:
    """Draw samples until they have enough cases that would show a fault, or note NOT JUDGED.

    Each part is a sample of fixed size, and is judged by itself. So no decision depends on when the
    drawing ended, and a part that is not drawn cannot raise the rate of false alarms. Parts may be
    judged together if `lacks` looks at nothing that depends on what is judged.

    Args:
        item: the test (`request.node`).
        draw: a part, by its number.
        lacks: says of which cases the parts have too few; empty if of none.
        most: parts.
    """
    parts: list[T] = []
    while len(parts) < most:
        parts.append(draw(len(parts)))
        why = lacks(parts)
        if not why:
            return parts
    not_judged(item, why)
    return parts


def lacking(**cases: tuple[int, float]) -> str:
    """Name the cases of which there are not more than wanted.

    Args:
        cases: how many there are, and how many there must be more than.
    """
    few = {what: pair for what, pair in cases.items() if pair[0] <= pair[1]}
    return ", ".join(f"{have} {what} ({least:g} wanted)" for what, (have, least) in few.items())


def assert_caught(
    item: pytest.Item,
    draw: Callable[[int], T],
    judge: Callable[[list[T]], tuple[float, int]],
    *,
    enough: int,
    most: int,
) -> None:
    """Draw parts of a wrong product's sample until it is caught.

    How many samples show the fault may depend on what the machine does at the same time. So the
    test fails if `enough` of them did and the wrong product still passes. If so many do not come in
    `most` parts, it is noted as NOT JUDGED. A look after each part is harmless here: it may catch a
    product by chance that is wrong anyway. What a right product passes is never decided so.

    Args:
        item: the test (`request.node`).
        draw: a part of the sample, by its number.
        judge: the p-value of all that was drawn, and the number of cases that show the fault.
        enough: cases.
        most: parts.
    """
    drawn: list[T] = []
    for part in range(most):
        drawn.append(draw(part))
        p_value, cases = judge(drawn)
        print(f"{part + 1} parts, {cases} cases: p = {p_value:.3g}")
        if is_caught(p_value):
            return
        assert cases < enough, f"p = {p_value:.3g} with {cases} cases"
    not_judged(item, f"p = {p_value:.3g} with {cases} cases of {enough}")
