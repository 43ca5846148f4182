import heapq

import pytest

from asyncrl.scheduler.errors import SchedulerError
from asyncrl.scheduler.placement import Placement, prompt_key
from asyncrl.scheduler.records import Group


def placement_of(*slots, group_size=4):
    placement = Placement(group_size)
    for i, n in enumerate(slots):
        generator = placement.add(f"g{i}", slots=n, limit=n, version=0)
        placement.offer(generator, 0)
    return placement, list(placement.generators.values())


def group(index, key=None, size=4):
    return Group.new(index, 0, key, size)


def test_groups_go_to_the_least_loaded_relative_to_slots():
    placement, _ = placement_of(4, 12)
    owners = [placement.place(group(i)).name for i in range(8)]
    assert owners.count("g0") == 2
    assert owners.count("g1") == 6


def test_a_prompt_returns_unless_its_generator_is_clearly_more_loaded():
    placement, (g0, g1) = placement_of(32, 32)
    assert placement.place(group(0, key=7)) is g0
    assert placement.place(group(1)) is g1
    assert placement.place(group(2)) is g0
    assert placement.place(group(3, key=7)) is g0, "more loaded, but not clearly"
    assert placement.place(group(4, key=7)) is g0, "more loaded by 8 samples, which is the slack"
    assert placement.place(group(5, key=7)) is g1, "more loaded by more than the slack"
    assert placement.place(group(6, key=7)) is g1, "and returns there from now on"


def test_a_prompt_does_not_queue_while_another_generator_is_idle():
    placement, (g0, g1) = placement_of(4, 4)
    assert placement.place(group(0, key=7)) is g0
    assert placement.place(group(1, key=7)) is g1


def test_an_idle_generator_takes_over_the_next_group_of_a_full_one():
    placement, (g0,) = placement_of(4)
    for i in range(4):
        placement.place(group(i))
    assert placement.next_group(g0, 99).index == 0
    g1 = placement.add("g1", slots=4, limit=4, version=0)
    placement.offer(g1, 0)
    assert placement.next_group(g1, -1) is None, "its version does not permit that step"
    taken = placement.next_group(g1, 99)
    assert (taken.index, taken.owner) == (1, g1)
    assert (g0.load, g1.load) == (12, 4)
    assert placement.next_group(g1, 99) is taken


def test_nothing_is_taken_over_from_a_generator_with_room():
    placement, (g0, g1) = placement_of(8, 4)
    first = group(0)
    placement.place(first)
    assert first.owner is g0
    assert placement.next_group(g1, 99) is None


def test_groups_of_a_lost_generator_wait_if_there_is_no_other():
    placement, (g0,) = placement_of(4)
    groups = [group(2), group(1)]
    for g in groups:
        placement.place(g)
    assert [g.index for g in placement.remove(g0)] == [1, 2]
    assert not placement.has_candidates
    for g in groups:
        assert placement.place(g) is None
    assert placement.next_unplaced().index == 1
    assert heapq.nsmallest(1, placement.unplaced)[0][0] == 2


@pytest.mark.parametrize("key", [-1, 1 << 31])
def test_a_prompt_key_must_be_an_index(key):
    with pytest.raises(SchedulerError, match="prompt index"):
        prompt_key(key)


def test_a_generator_with_an_older_version_gets_no_groups_until_it_installs_the_latest():
    placement, (g0, g1) = placement_of(8, 8)
    g1.version, g0.version = 1, 0
    for generator in (g0, g1):
        placement.offer(generator, 1)
    assert {placement.place(group(i)).name for i in range(3)} == {"g1"}
    g0.installing = 1
    placement.offer(g0, 1)
    assert placement.place(group(3)) is g0


def measure(placement, fast, slow):
    """One is four times as fast as the other."""
    for generator, speed in ((fast, 40.0), (slow, 10.0), (fast, 40.0)):
        placement.measured(generator, speed)


def test_slow_generators_get_groups_when_the_others_would_be_done_later():
    placement, (fast, slow) = placement_of(8, 8)
    measure(placement, fast, slow)
    assert (fast.speed, slow.speed) == (pytest.approx(2.0), pytest.approx(0.5))
    owners = [placement.place(group(i)).name for i in range(40)]
    assert set(owners[:24]) == {"g0"}, "96 samples on 8 slots take as long as one on the slow one"
    assert 26 <= owners.count("g0") <= 38


def test_speeds_that_are_alike_and_speeds_of_the_lost_change_nothing():
    placement, (g0, g1) = placement_of(8, 8)
    for generator, speed in ((g0, 13.0), (g1, 10.0), (g0, 0.0), (g1, float("inf"))):
        placement.measured(generator, speed)
    assert (g0.speed, g1.speed) == (1.0, 1.0)
    placement.measured(g0, 1000.0)
    placement.remove(g0)
    placement.measured(g1, 10.0)
    assert g1.speed == 1.0, "there is nothing to compare it with"


def test_a_measured_speed_is_smoothed_and_one_that_hardly_changes_is_kept():
    placement, (g0, g1) = placement_of(8, 8)
    measure(placement, g0, g1)
    placement.measured(g1, 11.0)
    assert g1.speed == pytest.approx(0.5)
    for _ in range(20):
        placement.measured(g1, 40.0)
        assert g1.speed <= 1.0
    assert g1.speed == 1.0


def test_a_slow_generator_takes_over_the_last_group_and_only_if_it_is_done_with_it_sooner():
    placement, (fast, slow) = placement_of(4, 4)
    measure(placement, fast, slow)
    slow.load = 99  # it has no room yet
    placement.update(slow)
    for i in range(12):
        assert placement.place(group(i)) is fast
    slow.load = 0
    assert placement.next_group(slow, 99) is None, "its owner would be done with it in the time"
    slow.load = 99
    for i in range(12, 15):
        assert placement.place(group(i)) is fast
    slow.load = 0
    assert placement.next_group(slow, 12).index == 12, "the last one that may be started"
    assert fast.load == 14 * 4
