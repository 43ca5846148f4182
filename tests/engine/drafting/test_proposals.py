"""Proposals: earlier continuations first, the source for all other rows, in the rows' order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.engine.drafting.proposals import (
    NO_HANDLE,
    Continuations,
    Proposer,
    offsets_of,
    path_probabilities,
)
from asyncrl.rollout.trajectory import IntArray


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


class Source:
    """Drafts `100 * handle`, `100 * handle + 1`, .. for each row, one token less than it may."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def open(self, key: str, context: IntArray) -> int:
        raise NotImplementedError

    def close(self, row: int) -> None: ...

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None: ...

    def advance(self, policy_version: int) -> None: ...

    def draft(
        self,
        rows: IntArray,
        budgets: IntArray,
        *,
        branching: bool = False,
        min_probability: float = 0.0,
    ) -> Drafts:
        self.asked += rows.tolist()
        lengths = budgets - 1
        step = np.concatenate([np.arange(n) for n in lengths])
        return Drafts(
            (np.repeat(rows * 100, lengths) + step).astype(np.int32),
            (step - 1).astype(np.int32),
            offsets_of(lengths),
            (0.5 ** (step + 1)).astype(np.float32),
        )


ROWS = st.lists(
    st.tuples(
        st.integers(0, 6),  # tokens of an earlier continuation
        st.sampled_from([NO_HANDLE, 1, 2, 3]),
        st.integers(0, 5),  # budget
        st.integers(0, 5),  # deepest path
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200)
@given(rows=ROWS, with_source=st.booleans())
def test_each_row_gets_its_own_drafts(
    rows: list[tuple[int, int, int, int]], with_source: bool
) -> None:
    texts = Continuations()
    for slot, (length, *_) in enumerate(rows):
        texts.begin(slot, 1000 + np.arange(length, dtype=np.int32))
    source = Source() if with_source else None
    _, handles, budgets, depths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    stops = np.full((len(rows), 2), -1)
    stops[::2] = 1002, 101
    drafts = Proposer(source, texts, branching=False).propose(
        np.arange(len(rows)), handles, budgets, depths, stops=stops, min_probability=0.0
    )
    asked = []
    for i, (length, handle, budget, depth) in enumerate(rows):
        part = slice(drafts.offsets[i], drafts.offsets[i + 1])
        follows = min(length, budget, depth)
        if follows:
            expected = list(range(1000, 1000 + follows))
            estimates = path_probabilities(follows)
        elif with_source and handle != NO_HANDLE and budget:
            asked.append(handle)
            expected = list(range(100 * handle, 100 * handle + budget - 1))
            estimates = 0.5 ** np.arange(1, budget)
        else:
            expected, estimates = [], np.empty(0)
        ends = [place + 1 for place, token in enumerate(expected) if token in stops[i]]
        expected, estimates = expected[: (*ends, 99)[0]], estimates[: (*ends, 99)[0]]
        assert drafts.tokens[part].tolist() == expected
        assert drafts.parents[part].tolist() == list(range(-1, len(expected) - 1))
        np.testing.assert_allclose(drafts.path_probabilities[part], estimates, rtol=1e-6)
    assert len(drafts.tokens) == drafts.offsets[-1]
    assert asked == (source.asked if source else [])


@pytest.mark.parametrize(("min_probability", "length"), [(0.0, 8), (0.9, 2), (0.96, 0)])
def test_improbable_tokens_of_a_continuation_are_not_proposed(
    min_probability: float, length: int
) -> None:
    texts = Continuations()
    texts.begin(0, np.arange(8, dtype=np.int32))
    eight = np.array([8], np.int32)
    drafts = Proposer(None, texts, branching=False).propose(
        np.array([0]),
        np.array([NO_HANDLE]),
        eight,
        eight,
        stops=np.full((1, 1), -1),
        min_probability=min_probability,
    )
    assert len(drafts.tokens) == length


class Forked(Source):
    """Proposes one tree: 5 below the root with 6 and 7 below it, then 8, and 9 below 7."""

    def draft(self, rows: IntArray, *_: object, **__: object) -> Drafts:
        tokens, parents = ids(5, 8, 6, 7, 9), ids(-1, -1, 0, 0, 3)
        return Drafts(tokens, parents, ids(0, 5), np.arange(5, dtype=np.float32))


@pytest.mark.parametrize(
    ("stops", "tokens", "parents"),
    [
        ([-1, -1], [5, 8, 6, 7, 9], [-1, -1, 0, 0, 3]),
        ([7, 8], [5, 8, 6, 7], [-1, -1, 0, 0]),
        ([5, -1], [5, 8], [-1, -1]),
        ([5, 6], [5, 8], [-1, -1]),
        ([6, 9], [5, 8, 6, 7, 9], [-1, -1, 0, 0, 3]),
    ],
)
def test_nothing_of_a_tree_follows_a_stop(
    stops: list[int], tokens: list[int], parents: list[int]
) -> None:
    eight = ids(8)
    drafts = Proposer(Forked(), Continuations(), branching=True).propose(
        ids(0), ids(1), eight, eight, stops=ids(*stops)[None], min_probability=0.0
    )
    assert (drafts.tokens.tolist(), drafts.parents.tolist()) == (tokens, parents)
    assert drafts.offsets.tolist() == [0, len(tokens)]
    assert drafts.path_probabilities.tolist() == [[5, 8, 6, 7, 9].index(one) for one in tokens]
