"""The trainer's queue: whole groups, each once."""

from __future__ import annotations

import random

import pytest
from deliveries_of import delivery_of
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.trajectory import SampleId
from asyncrl.trainer_process.delivery_check import GroupQueue
from asyncrl.wire.messages.data import TrajectoryDelivery, decode_trajectory


def delivery(group: int, sample: int, *, step: int = 0, reward: float = 0.0) -> TrajectoryDelivery:
    return delivery_of(SampleId(group, sample), step=step, reward=reward)


def add(queue: GroupQueue, delivery: TrajectoryDelivery, *, next_step: int = 0) -> bool:
    trajectory = decode_trajectory(delivery)
    return queue.add(delivery, trajectory, generator="g0", next_step=next_step)


def test_a_whole_group_is_handed_out_once_in_the_order_of_its_samples() -> None:
    queue = GroupQueue(3)
    for sample in (2, 0, 1):
        assert not queue.take(0, allowed=None)
        assert add(
            queue, delivery_of(SampleId(7, sample), reward=sample, terms=(float(sample), 0.5))
        )
    ((group, trajectories, rewards, generators, terms),) = queue.take(0, allowed=None)
    assert group == 7
    assert [t.id.sample for t in trajectories] == [0, 1, 2]
    assert rewards.tolist() == [0, 1, 2]
    assert generators == ["g0"] * 3
    assert terms == [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5)]
    assert not queue.take(0, allowed=None)
    assert not add(queue, delivery(7, 1)), "a late duplicate of a taken group"
    assert queue.trajectories == 0
    assert queue.duplicates == 1


def test_only_groups_of_the_plan_are_handed_out() -> None:
    queue = GroupQueue(1)
    add(queue, delivery(1, 0))
    add(queue, delivery(2, 0))
    (taken,) = queue.take(0, allowed={2})
    assert taken.group == 2
    assert not queue.take(0, allowed={2})
    queue.forget_before(1)
    assert queue.trajectories == 0


def test_several_groups_are_taken_until_they_have_so_many_tokens() -> None:
    queue = GroupQueue(1)
    sizes = []
    for group in range(5):
        one = delivery(group, 0)
        trajectory = decode_trajectory(one)
        sizes.append(len(trajectory.prompt_tokens) + len(trajectory.tokens))
        add(queue, one)

    def take(tokens: int, allowed: set[int] | None = None) -> list[int]:
        return [one.group for one in queue.take(0, allowed=allowed, tokens=tokens)]

    assert take(0) == [0], "one, whatever its size"
    assert take(sizes[1] + 1) == [1, 2]
    assert take(10**6, {4}) == [4], "only those of the plan"
    assert take(10**6) == [3]
    assert take(10**6) == []


def test_samples_of_earlier_steps_are_dropped() -> None:
    queue = GroupQueue(2)
    add(queue, delivery(1, 0))
    queue.forget_before(1)
    assert queue.trajectories == 0
    assert not add(queue, delivery(1, 1), next_step=1)


def test_a_sample_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="outside a group of 2"):
        add(GroupQueue(2), delivery(0, 2))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1), st.floats(0, 0.5))
def test_every_trajectory_is_taken_exactly_once_even_if_it_arrives_twice(
    groups: int, size: int, seed: int, repeated: float
) -> None:
    rng = random.Random(seed)
    queue = GroupQueue(size)
    deliveries = [delivery(g, s, step=g % 2) for g in range(groups) for s in range(size)]
    deliveries += [d for d in deliveries if rng.random() < repeated]
    rng.shuffle(deliveries)
    taken: list[SampleId] = []
    for each in deliveries:
        add(queue, each)
        for step in (0, 1):
            while found := queue.take(step, allowed=None):
                taken += [t.id for t in found[0].trajectories]
    assert sorted(taken) == sorted(SampleId(g, s) for g in range(groups) for s in range(size))
    assert queue.trajectories == 0
