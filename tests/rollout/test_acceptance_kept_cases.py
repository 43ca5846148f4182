"""Kept tokens: single cases, refusals, and SPEC-RL's rule against its definition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.acceptance import TopKDistributions, accept_lenient, verify_kept
from rollout.trajectory import KeptTokens

NO_TAIL = -np.inf


def one_row(
    tokens: list[int], q: TopKDistributions, p: TopKDistributions, **changes: object
) -> tuple[int, int]:
    n = len(tokens)
    arguments: dict[str, object] = {
        "tail_ids": np.full(n, -1),
        "tail_logprobs": np.full(n, NO_TAIL),
        "offsets": [0, n],
        "uniforms": np.full((n, 2), 0.5),
    }
    verdicts = verify_kept(tokens, q, p, **(arguments | changes))  # type: ignore[arg-type]
    return int(verdicts.accepted[0]), int(verdicts.token[0])


def known(*rows: dict[int, float]) -> TopKDistributions:
    width = max(map(len, rows))
    ids = [[*row, *[-1] * (width - len(row))] for row in rows]
    logs = [[*np.log(list(row.values())), *[NO_TAIL] * (width - len(row))] for row in rows]
    return TopKDistributions(
        np.zeros(len(rows), np.float32), np.array(ids, np.int32), np.array(logs, np.float32)
    )


@pytest.mark.parametrize("block", [False, True])
def test_a_token_that_is_missing_from_its_own_list_is_rejected(block: bool) -> None:
    q, p = known({0: 0.6, 1: 0.2}), known({2: 0.9, 0: 0.1})
    assert one_row([2], q, p, block=block) == (0, 2)
    assert one_row([1], q, p, block=block) == (0, 2)


@pytest.mark.parametrize("block", [False, True])
def test_a_residual_that_vanished_by_rounding_is_drawn_from_p(block: bool) -> None:
    # The lists of p and q agree, and 3 was drawn from a tail of 1e-9 that rounding removed.
    q, p = known({0: 0.5, 1: 0.5}), known({0: 0.5, 1: 0.5})
    assert one_row([3], q, p, uniforms=[[0.0, 0.99]], block=block) == (0, 1)
    assert one_row([3], q, p, uniforms=[[0.0, 0.2]], block=block) == (0, 0)


def test_a_tail_is_drawn_with_its_probability() -> None:
    q, p = known({0: 1.0}), known({0: 0.5})
    tail = {"tail_ids": [7], "tail_logprobs": [np.log(0.3)], "block": False}
    assert one_row([0], q, p, uniforms=[[0.49, 0.0]], **tail) == (1, -1)
    assert one_row([0], q, p, uniforms=[[0.51, 0.0]], **tail) == (0, 7)
    tail["tail_logprobs"] = [NO_TAIL]  # not drawn yet: the id stands for any token outside the list
    assert one_row([0], q, p, uniforms=[[0.51, 0.0]], **tail) == (0, 7)


def test_by_block_a_likely_token_makes_up_for_an_unlikely_one() -> None:
    """A token with p/q = 1/2, then one with 2: together as likely as before, so both are kept."""
    q = known({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5})
    p = known({0: 0.25, 1: 0.75}, {0: 1.0})
    late = np.array([[0.9, 0.5], [0.9, 0.5]])
    assert one_row([0, 0], q, p, uniforms=late, block=True) == (2, -1)
    assert one_row([0, 0], q, p, uniforms=late, block=False)[0] == 0


def test_without_a_list_nothing_is_accepted() -> None:
    empty = TopKDistributions(
        np.zeros(1, np.float32), np.empty((1, 0), np.int32), np.empty((1, 0), np.float32)
    )
    assert one_row([0], empty, empty, tail_ids=[5], tail_logprobs=[-3.0]) == (0, 5)


def test_no_rows_and_empty_rows() -> None:
    nothing = TopKDistributions(
        np.empty(0, np.float32), np.empty((0, 2), np.int32), np.empty((0, 2), np.float32)
    )
    verdicts = verify_kept(
        [], nothing, nothing, tail_ids=[], tail_logprobs=[], offsets=[0, 0, 0],
        uniforms=np.empty((0, 2)),
    )  # fmt: skip
    assert verdicts.accepted.tolist() == [0, 0]
    assert verdicts.token.tolist() == [-1, -1]


def test_rows_of_several_requests_are_concatenated() -> None:
    parts = [
        KeptTokens(np.zeros(n, np.int32), np.full(n, -1.0, np.float32),
                   np.full((n, k), n, np.int32), np.full((n, k), -2.0, np.float32))
        for n, k in ((1, 2), (0, 3), (2, 1))
    ]  # fmt: skip
    together = TopKDistributions.concatenate(parts)
    assert together.topk_ids.tolist() == [[1, 1, -1], [2, -1, -1], [2, -1, -1]]
    assert np.isneginf(together.topk_logprobs[1:, 1:]).all()
    assert len(together.logprobs) == 3
    assert TopKDistributions.concatenate([]).topk_ids.shape == (0, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offsets": [0, 2]}, "rise from 0 to 1"),
        ({"uniforms": np.zeros((1, 1))}, r"uniforms must be \(1, 2\)"),
        ({"tail_ids": [1, 2]}, "as many tail draws"),
        ({"tail_ids": [0], "tail_logprobs": [-3.0]}, "not a distribution"),
        ({"tail_ids": [5], "tail_logprobs": [-0.1]}, "not a distribution"),
        ({}, "not a distribution"),
    ],
)
def test_contradictory_arguments_are_refused(changes: dict[str, object], said: str) -> None:
    same = known({0: 0.5})
    with pytest.raises(ValueError, match=said):
        one_row([0], same, same, **changes)


def test_nan_and_wrong_shapes_are_refused() -> None:
    same = known({0: 1.0})
    broken = replace(same, topk_logprobs=np.array([[np.nan]], np.float32))
    with pytest.raises(ValueError, match="log-probabilities of current are nan"):
        one_row([0], same, broken)
    with pytest.raises(ValueError, match=r"behaviour needs top-K of shape \(2, K\)"):
        one_row([0, 0], same, same, uniforms=np.zeros((2, 2)))


# SPEC-RL's rule.


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 1.0, 2.0]))
def test_lenient_follows_its_definition_row_by_row(seed: int, lenience: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, rng.integers(0, 5))
    n = int(lengths.sum())
    q, p, u = np.log(rng.random(n) + 1e-3), np.log(rng.random(n)), rng.random(n)
    p[rng.random(n) < 0.1] = -np.inf
    offsets = np.cumsum([0, *lengths])
    got = accept_lenient(q, p, offsets, u, lenience)
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        want = 0
        while start + want < end and u[start + want] < lenience * np.exp(
            p[start + want] - q[start + want]
        ):
            want += 1
        assert got[row] == want


def test_lenient_refuses_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="not positive"):
        accept_lenient([-1.0], [-1.0], [0, 1], [0.5], 0.0)
    with pytest.raises(ValueError, match="probability 0 when it was drawn"):
        accept_lenient([-np.inf], [-1.0], [0, 1], [0.5], 1.0)
    with pytest.raises(ValueError, match="as many"):
        accept_lenient([-1.0], [-1.0], [0, 1], [0.5, 0.5], 1.0)
