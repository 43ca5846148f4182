import pytest
from pydantic import ValidationError

from scheduler.config import SchedulerConfig
from scheduler.policy import Asynchronous, Synchronous, policy_for


def test_defaults():
    config = SchedulerConfig()
    assert (config.max_off_policy_steps, config.on_update) == (1, "keep")
    assert (config.group_size, config.groups_per_step, config.max_attempts) == (8, 16, 3)


@pytest.mark.parametrize("mode", ["verify", "recompute"])
def test_modes_of_a_later_version_are_refused_by_name(mode):
    with pytest.raises(ValidationError, match=f"'{mode}' is not built yet; use 'keep'"):
        SchedulerConfig(on_update=mode)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_off_policy_steps": -1},
        {"on_update": "never"},
        {"group_size": 0},
        {"groups_per_step": 0},
        {"max_in_flight_per_generator": 0},
        {"max_attempts": 0},
        {"max_of_policy_steps": 1},
    ],
)
def test_impossible_values_and_unknown_keys_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SchedulerConfig(**wrong)


@pytest.mark.parametrize(("slots", "limit"), [(1, 2), (8, 10), (64, 72), (256, 264)])
def test_a_few_samples_wait_at_the_generator(slots, limit):
    assert SchedulerConfig(group_size=8).in_flight_limit(slots) == limit
    assert SchedulerConfig(max_in_flight_per_generator=5).in_flight_limit(slots) == 5


def test_no_staleness_is_the_synchronous_policy():
    synchronous = policy_for(SchedulerConfig(max_off_policy_steps=0))
    asynchronous = policy_for(SchedulerConfig(max_off_policy_steps=2))
    assert isinstance(synchronous, Synchronous)
    assert isinstance(asynchronous, Asynchronous)
    assert [synchronous.newest_step(v) for v in (0, 3)] == [0, 3]
    assert [asynchronous.newest_step(v) for v in (0, 3)] == [2, 5]
    assert [Asynchronous(0).newest_step(v) for v in range(5)] == [
        synchronous.newest_step(v) for v in range(5)
    ]
