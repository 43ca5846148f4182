"""Kept tokens: single cases, refusals, and SPEC-RL's rule against its definition."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.acceptance import accept_lenient, symbols_of, verify_kept


def one_row(
    symbols: list[int], q: list[list[float]], p: list[list[float]], **changes: object
) -> tuple[int, int, bool]:
    """Accepted tokens, the symbol after them, whether it is renamed; q and p of listed tokens."""
    n = len(symbols)
    arguments: dict[str, object] = {"offsets": [0, n], "uniforms": np.full((n, 2), 0.5)} | changes
    with np.errstate(divide="ignore"):
        logs = (np.log(np.array(q, np.float32)), np.log(np.array(p, np.float32)))
    verdicts = verify_kept(symbols, *logs, **arguments)  # type: ignore[arg-type]
    return int(verdicts.accepted[0]), int(verdicts.symbol[0]), bool(verdicts.renamed[0])


@pytest.mark.parametrize("block", [False, True])
def test_a_tail_is_a_symbol_like_any_other(block: bool) -> None:
    """Listed 0.6 and 0.2 before, 0.5 and 0.1 now: the tail has 0.2 before and 0.4 now."""
    q, p = [[0.6, 0.2]], [[0.5, 0.1]]
    assert one_row([2], q, p, uniforms=[[0.999, 0.0]], block=block) == (1, -1, False)
    assert one_row([1], q, p, uniforms=[[0.49, 0.0]], block=block) == (1, -1, False)
    assert one_row([1], q, p, uniforms=[[0.51, 0.999]], block=block) == (0, 2, False)
    assert one_row([2], p, q, uniforms=[[0.51, 0.99]], block=block) == (0, 1, False)


@pytest.mark.parametrize("block", [False, True])
def test_a_residual_that_vanished_by_rounding_is_drawn_from_p(block: bool) -> None:
    # The lists of p and q agree, and a token was drawn from a tail of 1e-9 that rounding removed.
    same = [[1.0, 0.0]]
    assert one_row([2], same, same, uniforms=[[0.0, 0.99]], block=block) == (0, 0, False)


@pytest.mark.parametrize("block", [False, True])
def test_a_row_ends_with_a_new_name(block: bool) -> None:
    """What followed the old name is not judged, and the new one is the token to append."""
    q, p = [[0.5], [0.5], [0.5]], [[0.5], [0.5], [0.01]]
    changed = [False, True, False]
    assert one_row([0, 1, 0], q, p, renamed=changed, block=block) == (1, 1, True)
    rejected = [[0.5], [0.99], [0.5]]
    late = np.full((3, 2), 0.9)
    found = one_row([0, 1, 0], q, rejected, renamed=changed, uniforms=late, block=block)
    assert found == (1, 0, False), "the tail symbol itself is rejected"
    twice = [[0.5], [0.5], [0.5]]
    assert one_row([1, 1, 1], twice, twice, renamed=[True] * 3, block=block) == (0, 1, True)


def test_by_block_a_likely_token_makes_up_for_an_unlikely_one() -> None:
    """A token with p/q = 1/2, then one with 2: together as likely as before, so both are kept."""
    q, p = [[0.5, 0.5], [0.5, 0.5]], [[0.25, 0.75], [1.0, 0.0]]
    late = np.array([[0.9, 0.5], [0.9, 0.5]])
    assert one_row([0, 0], q, p, uniforms=late, block=True) == (2, -1, False)
    assert one_row([0, 0], q, p, uniforms=late, block=False)[0] == 0


def test_without_a_list_every_token_is_of_the_tail() -> None:
    assert one_row([0], [[]], [[]]) == (1, -1, False)
    assert one_row([0], [[]], [[]], renamed=[True]) == (0, 0, True)


def test_no_rows_and_empty_rows() -> None:
    nothing = np.empty((0, 2), np.float32)
    verdicts = verify_kept([], nothing, nothing, offsets=[0, 0, 0], uniforms=np.empty((0, 2)))
    assert verdicts.accepted.tolist() == [0, 0]
    assert verdicts.symbol.tolist() == [-1, -1]
    assert verdicts.renamed.tolist() == [False, False]


def test_symbols_are_places_in_lists() -> None:
    lists = np.array([[4, 9, -1], [9, 4, 7]], np.int32)
    assert symbols_of(np.array([9, 5], np.int32), lists).tolist() == [1, 3]
    assert symbols_of(np.array([7], np.int32), np.empty((1, 0), np.int32)).tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offsets": [0, 2]}, "rise from 0 to 1"),
        ({"uniforms": np.zeros((1, 1))}, r"uniforms must be \(1, 2\)"),
        ({"symbols": [2]}, "at most K = 1"),
        ({"symbols": [-1]}, "must lie between 0"),
        ({"p": [[0.5, 0.1]]}, "the same tokens, not 1 and 2"),
        ({"p": [[1.2]]}, "has mass 1.2"),
        ({"p": [[np.nan]]}, "current is not part of a distribution at position 0"),
        ({"p": [[0.5], [0.5]]}, r"current needs log-probabilities of shape \(1, K\)"),
        ({"renamed": [True, False]}, "one value a token"),
        ({"renamed": [True]}, "true for the tail only"),
    ],
)
def test_contradictory_arguments_are_refused(changes: dict[str, Any], said: str) -> None:
    given_ = {"symbols": [0], "q": [[0.5]], "p": [[0.5]]} | changes
    with pytest.raises(ValueError, match=said):
        one_row(**given_)


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
