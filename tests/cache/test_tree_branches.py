"""Token trees: drafts where earlier rollouts continued in several ways."""

import itertools

import numpy as np
import pytest
from cache_check import check
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_caches import cache_of

from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache

PROMPT = np.array([101, 102, 103, 104], np.int32)


def make(**settings: object) -> RolloutCache:
    defaults = {"max_bytes": 1 << 20, "min_probability": 0.0, "calibrate": False}
    return cache_of(**(defaults | settings))


def grow(cache: RolloutCache, row: int, budget: int = 16, least: float = 0.0) -> Drafts:
    return cache.draft(np.array([row]), np.array([budget]), branching=True, min_probability=least)


def test_all_continuations_are_drafted_the_likeliest_first() -> None:
    cache = make(doubt=0.0)
    for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5], [6]):
        cache.insert("p", PROMPT, np.array(tokens))
    drafts = grow(cache, cache.open("p", PROMPT), 6)
    assert drafts.tokens[:3].tolist() == [1, 2, 3]
    assert sorted(drafts.tokens[3:].tolist()) == [4, 5, 6]
    named = dict(zip(drafts.tokens.tolist(), drafts.parents.tolist(), strict=True))
    assert named == {1: -1, 2: 0, 3: 1, 4: 1, 5: 0, 6: -1}
    np.testing.assert_allclose(drafts.path_probabilities, [0.8, 0.6, 0.4, 0.2, 0.2, 0.2], rtol=1e-3)


def test_without_forks_a_tree_equals_the_chain() -> None:
    cache = make(doubt=0.3)
    for _ in range(3):
        cache.insert("p", PROMPT, np.arange(1, 40))
    row = cache.open("p", PROMPT)
    chain = cache.draft(np.array([row]), np.array([12]))
    tree = grow(cache, row, 12)
    assert tree.tokens.tolist() == chain.tokens.tolist() == list(range(1, 13))
    assert tree.parents.tolist() == chain.parents.tolist() == list(range(-1, 11))
    np.testing.assert_allclose(tree.path_probabilities, chain.path_probabilities, rtol=1e-6)


def test_a_branch_without_candidates_is_searched_for_separately() -> None:
    cache = make(min_match=2)
    cache.insert("q", PROMPT, np.array([1]))
    for tokens in ([1, 2, 3], [1, 7, 8], [50, 2, 3, 4, 5], [51, 7, 8, 9, 10]):
        cache.insert("p", PROMPT, np.array(tokens))
    row = cache.open("p", PROMPT)
    cache.extend(np.array([row]), np.array([1]), np.array([0, 1]))
    drafts = grow(cache, row)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(drafts.tokens, drafts.parents, strict=True)):
        paths[node] = (*paths[int(parent)], int(token))
    assert {(2, 3, 4, 5), (7, 8, 9, 10)} <= set(paths.values())


def test_few_long_matches_leave_some_votes_to_shorter_ones() -> None:
    cache = make(doubt=0.0, min_match=2, max_match=4)
    cache.insert("p", PROMPT, np.array([1, 2, 3, 4, 50]))
    for first in (60, 61, 62):
        cache.insert("p", PROMPT, np.array([first, 3, 4, 9]))
    row = cache.open("p", PROMPT)
    cache.extend(np.array([row]), np.array([1, 2, 3, 4]), np.array([0, 4]))
    drafts = grow(cache, row, 2)
    assert drafts.tokens.tolist() == [50, 9]
    np.testing.assert_allclose(drafts.path_probabilities, [1 / 1.1, 0.1 / 1.1], rtol=1e-5)


def test_nothing_below_the_minimum_probability_is_drafted() -> None:
    cache = make(doubt=0.0, min_probability=0.15)
    for tokens in ([1, 2], [1, 3], [1, 2], [4, 5], [1, 2]):
        cache.insert("p", PROMPT, np.array(tokens))
    row = cache.open("p", PROMPT)
    assert sorted(grow(cache, row).tokens.tolist()) == [1, 2, 3, 4, 5]
    assert grow(cache, row, least=0.5).tokens.tolist() == [1, 2]
    assert grow(cache, row, least=0.9).tokens.tolist() == []


@pytest.mark.parametrize("branching", [False, True])
def test_rows_that_need_no_draft_get_none(branching: bool) -> None:
    cache = make(max_draft_tokens=0)
    cache.insert("p", PROMPT, np.arange(9))
    row = cache.open("p", PROMPT)
    assert not len(cache.draft(np.array([row]), np.array([9]), branching=branching).tokens)
    cache = make()
    cache.insert("p", PROMPT, np.arange(9))
    rows = np.array([cache.open("p", PROMPT), cache.open("", PROMPT), cache.open("q", PROMPT)])
    drafts = cache.draft(rows, np.array([0, 9, 9]), branching=branching)
    assert drafts.offsets.tolist() == [0, 0, 0, 0]


def test_a_row_that_repeats_itself_drafts_its_own_text() -> None:
    cache = make(min_match=2, max_match=6)
    row = cache.open("p", PROMPT)
    said = [1, 2, 3] * 4
    cache.extend(np.array([row]), np.array(said), np.array([0, len(said)]))
    assert grow(cache, row, 1).tokens.tolist() == [1]


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 24), st.booleans())
def test_fewer_nodes_are_the_first_ones_of_more(seed: int, budget: int, calibrate: bool) -> None:
    rng = np.random.default_rng(seed)
    cache = make(max_draft_tokens=24, calibrate=calibrate)
    for _ in range(12):
        cache.insert("p", PROMPT, rng.integers(0, 3, 30))
    row = cache.open("p", PROMPT)
    said = rng.integers(0, 3, 6)
    cache.extend(np.array([row]), said, np.array([0, 6]))
    most, fewer = grow(cache, row, 24), grow(cache, row, budget)
    count = len(fewer.tokens)
    assert count == min(budget, len(most.tokens))
    np.testing.assert_array_equal(fewer.path_probabilities, most.path_probabilities[:count])
    chain, node = 0.0, -1  # always the likeliest child, as in a chain
    for at, parent in enumerate(most.parents.tolist()):
        if parent == node and count:
            chain, node, count = chain + float(most.path_probabilities[at]), at, count - 1
    assert fewer.path_probabilities.sum() >= chain - 1e-5
    children: dict[int, float] = {}
    for parent, path in zip(most.parents.tolist(), most.path_probabilities, strict=True):
        children[parent] = children.get(parent, 0.0) + float(path)
    for parent, total in children.items():
        whole = float(most.path_probabilities[parent]) if parent >= 0 else 1.0
        assert total <= whole * (1 + 1e-5), "children are likelier than their parent"


def test_concurrent_rows_of_one_prompt_do_not_disturb_each_other() -> None:
    cache = make()
    for last in (7, 8):
        cache.insert("p", PROMPT, np.array([1, 2, 3, last]))
    rows = np.array([cache.open("p", PROMPT) for _ in range(40)])
    tokens = np.array([[1, 2, 3][: 1 + i % 3] for i in range(40) for _ in (0,)], object)
    flat = np.array(list(itertools.chain.from_iterable(tokens)))
    cache.extend(rows, flat, np.cumsum([0, *map(len, tokens)]))
    together = cache.draft(rows, np.full(40, 6), branching=True)
    for at, row in enumerate(rows):
        alone = grow(cache, int(row), 6)
        span = slice(together.offsets[at], together.offsets[at + 1])
        assert together.tokens[span].tolist() == alone.tokens.tolist()
        assert together.parents[span].tolist() == alone.parents.tolist()
    check(cache)
