"""Drafts go to the rows that a step waits for, at a stated cost in tokens a second."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.drafting.planner import MOST_LOSS, DraftPlanner
from asyncrl.engine.drafting.worth import AHEAD, SHORT, worth_of

DEPTH = 8


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_token_is_worth_what_its_row_has_left_squared_and_run_ahead_little() -> None:
    worth = worth_of(ints(0, 0, 0, 1, 2), ints(1000, 250, 5, 9000, 0), ints(0, 500, 0, 0, 9000))
    assert worth is not None
    assert worth.tolist() == [1, 0.25, (SHORT / 1000) ** 2, AHEAD, AHEAD]


def test_rows_that_are_alike_have_no_worth() -> None:
    zeros = ints(0, 0, 0)
    assert worth_of(ints(1, 2, 1), ints(9, 900, 90), zeros) is None, "no step waits for them"
    assert worth_of(zeros, ints(1, 20, SHORT), zeros) is None, "all are short"
    assert worth_of(zeros, ints(700, 7, 7), ints(0, 700, 700)) is None
    assert worth_of(ints(), ints(), ints()) is None


def planner(seconds: float = 1e-4, free: int = 24) -> DraftPlanner:
    """One that knows steps which cost the same up to `free` tokens, and then so much a token."""
    made = DraftPlanner(max_step_tokens=512, max_draft_tokens=DEPTH)
    for _ in range(12):
        for tokens in (4, 8, 16, 24, 32, 48, 64, 96, 128):
            cost = 0.004 + seconds * max(0, tokens - free)
            made.observe(tokens=tokens, rows=8, context=800, seconds=cost)
    made.ask(np.full(8, 100, np.int32))
    return made


def chains(*rates: float) -> tuple[np.ndarray, np.ndarray]:
    paths = np.concatenate([rate ** np.arange(1, DEPTH + 1) for rate in rates])
    return paths.astype(np.float32), np.arange(0, DEPTH * len(rates) + 1, DEPTH, dtype=np.int32)


def test_the_row_that_the_step_waits_for_drafts_more_and_the_others_less() -> None:
    paths, offsets = chains(*[0.8] * 8)
    worth = np.array([1.0, *[AHEAD] * 7])
    alike = planner().choose(paths, offsets, rows=8)
    keep = planner().choose(paths, offsets, rows=8, worth=worth)
    assert np.ptp(alike) <= 1
    assert alike[0] < DEPTH == keep[0]
    assert keep[1:].sum() < alike[1:].sum()


@settings(max_examples=60)
@given(
    rates=st.lists(st.sampled_from((0.2, 0.6, 0.9, 0.97)), min_size=8, max_size=8),
    worth=st.lists(st.sampled_from((AHEAD, 0.1, 0.5, 1.0)), min_size=8, max_size=8),
    seconds=st.sampled_from((0.0, 2e-5, 1e-4, 1e-3)),
)
def test_it_costs_no_more_tokens_a_second_than_stated(
    rates: list[float], worth: list[float], seconds: float
) -> None:
    """By the planner's own curves, which say what a node yields and what a step costs."""
    paths, offsets = chains(*rates)
    one = planner(seconds)

    def rate_of(keep: np.ndarray) -> float:
        fed = np.arange(DEPTH) < keep[:, None]
        gains = one.calibration.apply(paths[fed.ravel()]).sum()
        took = one.times.curve(8, int(keep.sum()), rows=8, context=0, asked=True)[-1]
        return float((8 + gains) / took)

    alike = planner(seconds).choose(paths, offsets, rows=8)
    keep = one.choose(paths, offsets, rows=8, worth=np.array(worth))
    assert ((keep >= 0) & (keep <= DEPTH)).all()
    assert rate_of(keep) >= (1 - MOST_LOSS) * rate_of(alike) * (1 - 1e-9)


@pytest.mark.parametrize("spare", [0, 3])
def test_no_more_than_the_step_has_room_for(spare: int) -> None:
    paths, offsets = chains(*[0.9] * 8)
    worth = np.array([1.0, *[AHEAD] * 7])
    keep = planner().choose(paths, offsets, rows=8, other_tokens=512 - 8 - spare, worth=worth)
    assert keep.sum() <= spare
