import pytest
from pydantic import ValidationError

from asyncrl.scheduler.config import SchedulerConfig


def test_defaults():
    config = SchedulerConfig()
    assert (config.max_off_policy_steps, config.on_update) == (0, "verify")
    assert (config.runahead_groups, config.partial_rollout) == (32, True)
    assert (config.group_size, config.groups_per_step, config.max_attempts) == (8, 16, 3)


def test_recompute_needs_partial_rollouts():
    with pytest.raises(ValidationError, match="partial_rollout: false leaves no running sample"):
        SchedulerConfig(on_update="recompute", partial_rollout=False)


def test_run_ahead_needs_verification():
    with pytest.raises(ValidationError, match="max_runahead_groups: 4 needs"):
        SchedulerConfig(on_update="keep", max_runahead_groups=4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_off_policy_steps": -1},
        {"on_update": "never"},
        {"group_size": 0},
        {"groups_per_step": 0},
        {"max_in_flight_per_generator": 0},
        {"on_update": "verify", "max_runahead_groups": -1},
        {"max_attempts": 0},
        {"runahead_kv_limit": 0.0},
        {"runahead_kv_limit": 1.5},
        {"sample_deadline_seconds": 0.0},
        {"max_of_policy_steps": 1},
    ],
)
def test_impossible_values_and_unknown_keys_are_refused(wrong):
    with pytest.raises(ValidationError, match=list(wrong)[-1]):
        SchedulerConfig(**wrong)


@pytest.mark.parametrize(("slots", "limit"), [(1, 2), (8, 10), (64, 72), (256, 264)])
def test_a_few_samples_may_wait_at_the_generator(slots, limit):
    assert SchedulerConfig(group_size=8).in_flight_limit(slots) == limit
    assert SchedulerConfig(max_in_flight_per_generator=5).in_flight_limit(slots) == 5
