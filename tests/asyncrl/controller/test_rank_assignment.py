"""Groups are dealt to the ranks of a trainer so that these finish together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.controller.commands import RankAssignments

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=40)


@given(ranks=st.integers(1, 8), sizes=SIZES)
def test_no_rank_has_more_than_another_by_more_than_one_group(ranks: int, sizes: list[int]) -> None:
    deals = RankAssignments(ranks)
    given_tokens = [0] * ranks
    for group, tokens in enumerate(sizes):
        given_tokens[deals.rank_of(group, step=3, tokens=tokens)] += tokens
    assert max(given_tokens) - min(given_tokens) <= max(sizes)
    if ranks <= len(sizes):
        assert min(given_tokens) > 0


@given(ranks=st.integers(1, 8), sizes=SIZES, left_out=st.sets(st.integers(0, 39)))
def test_each_trained_group_is_planned_for_the_rank_that_has_it(
    ranks: int, sizes: list[int], left_out: set[int]
) -> None:
    deals = RankAssignments(ranks)
    dealt = {group: deals.rank_of(group, step=0, tokens=n) for group, n in enumerate(sizes)}
    members = tuple(group for group in dealt if group not in left_out)
    plans = deals.by_rank(0, members)
    assert len(plans) == ranks
    assert {group: rank for rank, groups in enumerate(plans) for group in groups} == {
        group: dealt[group] for group in members
    }


def test_samples_that_are_regenerated_go_where_the_others_of_their_group_are() -> None:
    deals = RankAssignments(2)
    assert [deals.rank_of(group, step=0, tokens=100) for group in range(3)] == [0, 1, 0]
    assert deals.rank_of(1, step=0, tokens=5) == 1
    assert deals.rank_of(3, step=0, tokens=5) == 1, "rank 0 has two groups"


def test_each_step_and_each_trainer_begins_with_nothing() -> None:
    deals = RankAssignments(2)
    assert deals.rank_of(0, step=0, tokens=100) == 0
    assert deals.rank_of(8, step=1, tokens=1) == 0
    assert deals.rank_of(1, step=0, tokens=100) == 1
    assert deals.rank_of(0, step=0, tokens=50, lineage=1) == 0
    assert deals.rank_of(1, step=0, tokens=50, lineage=1) == 1
    assert deals.by_rank(0, (0, 1)) == [(0,), (1,)]
    deals.by_rank(1, ())
    assert deals.rank_of(1, step=0, tokens=1, lineage=1) == 0, "earlier steps are forgotten"
