"""Token trees: acceptance by fresh draws against its definition and enumerated distributions."""

from __future__ import annotations

import numpy as np
import pytest
from false_alarms import Claims, is_caught
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.acceptance import accept_chain, accept_tree
from benchmarks.exactness.model import random_policy
from benchmarks.exactness.pure import PolicyPair, default_pair, tree
from benchmarks.exactness.stats import distance

CLAIMS = Claims(__file__)


def walk(samples: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """The nodes visited in one row, by the definition."""
    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        children = [j for j, parent in enumerate(parents) if parent == at and j > at]
        fitting = [j for j in children if tokens[j] == samples[at + 1]]
        if not fitting:
            return path
        path.append(fitting[0])


rows_of_trees = st.lists(
    st.integers(0, 7).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 2), min_size=n + 1, max_size=n + 1),
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
            st.tuples(*(st.integers(-1, j - 1) for j in range(n))),
        )
    ),
    max_size=5,
)


@given(rows_of_trees)
def test_it_follows_the_definition_row_by_row(
    rows: list[tuple[list[int], list[int], tuple[int, ...]]],
) -> None:
    offsets = np.cumsum([0, *(len(tokens) for _, tokens, _ in rows)])
    flat = [[value for row in rows for value in row[part]] for part in range(3)]
    walks = accept_tree(*(np.array(values, np.int32) for values in flat), offsets)
    assert walks.offsets[-1] == len(walks.nodes) == walks.accepted.sum()
    for i, (samples, tokens, parents) in enumerate(rows):
        path = walk(samples, tokens, list(parents))
        assert walks.accepted[i] == len(path)
        start, end = walks.offsets[i], walks.offsets[i + 1]
        assert (walks.nodes[start:end] - offsets[i]).tolist() == path
        emitted = walks.emitted[start + i : end + i + 1].tolist()
        assert emitted == [samples[j + 1] for j in [-1, *path]]
        assert emitted[:-1] == [tokens[j] for j in path]
        draws = walks.draws[start + i : end + i + 1]
        assert (draws - offsets[i] - i).tolist() == [j + 1 for j in [-1, *path]]


@given(st.integers(0, 2**32 - 1))
def test_on_chains_it_equals_accept_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = rng.integers(1, 5), rng.integers(0, 5)
    samples = rng.integers(0, 2, (rows, width + 1)).astype(np.int32)
    drafts = rng.integers(0, 2, (rows, width)).astype(np.int32)
    lengths = rng.integers(0, width + 1, rows).astype(np.int32)
    kept = accept_chain(samples, drafts, lengths)
    walks = accept_tree(
        np.concatenate([row[: n + 1] for row, n in zip(samples, lengths, strict=True)]),
        np.concatenate([row[:n] for row, n in zip(drafts, lengths, strict=True)]),
        np.concatenate([np.arange(n) - 1 for n in lengths]).astype(np.int32),
        np.cumsum([0, *lengths]),
    )
    np.testing.assert_array_equal(walks.accepted, kept)


def test_a_parent_behind_its_child_or_a_wild_index_only_loses_acceptance() -> None:
    walks = accept_tree([7, 0, 8], [8, 7], [1, -1], [0, 2])
    assert walks.emitted.tolist() == [7, 8]
    walks = accept_tree([7, 0, 0], [7, 7], [-5, 2**31 - 1], [0, 2])
    assert walks.accepted.tolist() == [0]
    assert walks.emitted.tolist() == [7]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_samples_drafted_by_trees_follow_the_policy(top_p: float) -> None:
    pair = default_pair(top_p=top_p)
    probabilities = pair.new.sequence_distribution()
    cells, notes = tree(pair, np.random.default_rng(0), 60_000)
    halves = np.stack([np.bincount(cells[i::2], minlength=len(probabilities)) for i in (0, 1)])
    assert notes["accepted"] > 10_000
    assert CLAIMS.fit(distance(halves, probabilities).p_value)


def test_reusing_the_draw_that_was_no_child_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rule: each child is tried with a draw of its own until one accepts.

    It prefers drafted tokens, and the same statistic detects that.
    """
    policy = random_policy(3, vocabulary=4, length=1)
    p = policy.sequence_distribution()
    rng = np.random.default_rng(0)
    children = np.array([0, 1])
    draws = rng.choice(4, size=(20_000, 3), p=p)
    out = np.where(draws[:, 0] == children[0], children[0], draws[:, 1])
    out = np.where((out != children[0]) & (draws[:, 2] == children[1]), children[1], out)
    counts = np.stack([np.bincount(out[i::2], minlength=4) for i in (0, 1)])
    assert is_caught(distance(counts, p).p_value)
    right = accept_tree(
        draws.ravel(), np.tile(children, 20_000), np.full(40_000, -1), np.arange(20_001) * 2
    ).emitted
    first = right[np.cumsum(np.concatenate([[0], 1 + (np.isin(draws[:-1, 0], children))]))]
    counts = np.stack([np.bincount(first[i::2], minlength=4) for i in (0, 1)])
    assert CLAIMS.fit(distance(counts, p).p_value)


def test_the_policy_pair_has_impossible_sequences_on_both_sides() -> None:
    pair = default_pair()
    assert isinstance(pair, PolicyPair)
    old, new = pair.old.sequence_distribution(), pair.new.sequence_distribution()
    assert 0.1 < 0.5 * np.abs(old - new).sum() < 0.5
    assert ((new == 0) & (old > 0)).any()
    assert ((new > 0) & (old == 0)).any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="as many parents and 3 samples, not 2 and 2"):
        accept_tree([1, 2], [1, 2], [-1, 0], [0, 2])
    with pytest.raises(ValueError, match="rise from 0 to 2"):
        accept_tree([1, 2, 3], [1, 2], [-1, 0], [0, 3])
    with pytest.raises(ValueError, match="rise from 0 to 2"):
        accept_tree([1, 2, 3, 4], [1, 2], [-1, 0], [0, 3, 2])
    with pytest.raises(TypeError, match="integers"):
        accept_tree([1.0, 2.0], [1], [-1], [0, 1])
    assert accept_tree([], [], [], [0]).emitted.tolist() == []
