import pytest
from pydantic import ValidationError

from scheduler.admission import Admission
from scheduler.config import SchedulerConfig


def test_defaults():
    config = SchedulerConfig()
    assert (config.max_off_policy_steps, config.on_update) == (0, "verify")
    assert (config.runahead_groups, config.partial_rollout) == (32, True)
    assert (config.group_size, config.groups_per_step, config.max_attempts) == (8, 16, 3)


def test_recompute_needs_something_that_runs_on():
    with pytest.raises(ValidationError, match="partial_rollout: false leaves no running sample"):
        SchedulerConfig(on_update="recompute", partial_rollout=False)


def test_running_ahead_needs_verification():
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
        {"on_update": "verify", "max_runahead_groups": 0},
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
def test_a_few_samples_wait_at_the_generator(slots, limit):
    assert SchedulerConfig(group_size=8).in_flight_limit(slots) == limit
    assert SchedulerConfig(max_in_flight_per_generator=5).in_flight_limit(slots) == 5


def test_how_far_each_mode_runs_ahead():
    def newest(version, **settings):
        settings = {"on_update": "keep", "groups_per_step": 4} | settings
        return Admission.of(SchedulerConfig(**settings)).last_group_to_start(version)

    assert [newest(v, max_off_policy_steps=0) for v in (0, 3)] == [3, 15]
    assert [newest(v, max_off_policy_steps=2) for v in (0, 3)] == [11, 23]
    assert newest(0, max_off_policy_steps=0, on_update="verify") == 11
    assert newest(0, max_off_policy_steps=1, on_update="verify", max_runahead_groups=3) == 10
    assert newest(0, max_off_policy_steps=2, on_update="recompute") == 11
    synchronous = Admission.of(SchedulerConfig(on_update="keep"))
    assert not synchronous.verifies
    assert Admission.of(SchedulerConfig(on_update="verify")).verifies
