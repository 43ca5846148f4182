from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scheduler.admission import Admission
from asyncrl.scheduler.config import SchedulerConfig


def test_how_far_each_mode_runs_ahead():
    def last_group(version, **settings):
        settings = {"on_update": "keep", "groups_per_step": 4} | settings
        return Admission.of(SchedulerConfig(**settings)).last_group(version, ahead=True)

    assert [last_group(v, max_off_policy_steps=0) for v in (0, 3)] == [3, 15]
    assert [last_group(v, max_off_policy_steps=2) for v in (0, 3)] == [11, 23]
    assert last_group(0, max_off_policy_steps=0, on_update="verify") == 11
    assert last_group(0, max_off_policy_steps=1, on_update="verify", max_runahead_groups=3) == 10
    assert last_group(0, max_off_policy_steps=2, on_update="recompute") == 11
    synchronous = Admission.of(SchedulerConfig(on_update="keep"))
    assert not synchronous.verifies
    assert Admission.of(SchedulerConfig(on_update="verify")).verifies


@given(
    bound=st.integers(0, 3),
    per_step=st.integers(1, 4),
    ahead=st.none() | st.integers(1, 9),
    group=st.integers(0, 40),
)
def test_a_group_that_needs_no_verification_is_within_the_staleness_bound(
    bound, per_step, ahead, group
):
    settings = {"on_update": "keep" if ahead is None else "verify", "max_runahead_groups": ahead}
    admission = Admission.of(
        SchedulerConfig(max_off_policy_steps=bound, groups_per_step=per_step, **settings)
    )
    step = group // per_step
    for version in range(step + 1):
        is_due = group <= admission.last_group(version, ahead=False)
        assert is_due == (step - version <= bound) == (version >= admission.min_version(step))
        assert is_due == (admission.versions_ahead(step, version) == 0)
    first = admission.first_version_to_start(group)
    assert (
        admission.last_group(first - 1, ahead=True)
        < group
        <= admission.last_group(first, ahead=True)
    )
