"""What becomes due with new weights is commanded together with them."""

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.commands import DeliverGroup, InstallWeights, StartSample, VerifySamples
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.events import (
    GeneratorJoined,
    SampleDelivered,
    SampleFinished,
    StepFinished,
    TrainerJoined,
    WeightsInstalled,
    WeightsPublished,
)
from asyncrl.scheduler.scheduler import Scheduler

STEP_1 = tuple(SampleId(group, sample) for group in (2, 3) for sample in (0, 1))


def scheduler_before_version_1(slots=8):
    """Step 0 is trained under version 0. Groups 2 to 5 run ahead, two to a step, if slots allow."""
    config = SchedulerConfig(
        group_size=2, groups_per_step=2, on_update="verify", max_runahead_groups=4
    )
    s = Scheduler(config, first_step=0, total_steps=9)
    s.on_event(TrainerJoined(0))
    s.on_event(GeneratorJoined("a", slots, 0))
    for group in (0, 1):
        for sample in (0, 1):
            finish(s, group, sample, 0)
    for group in (0, 1):
        for sample in (0, 1):
            s.on_event(SampleDelivered("a", SampleId(group, sample)))
    s.on_event(StepFinished(0, (0, 1)))
    s.check()
    return s


def finish(s, group, sample, version):
    commands = s.on_event(SampleFinished("a", SampleId(group, sample), 5, version))
    s.check()
    return commands


def installed(s, version):
    commands = s.on_event(WeightsInstalled("a", version))
    s.check()
    return commands


def verification(version, *samples):
    return VerifySamples("a", samples, version)


def test_an_install_names_what_is_due_with_it_in_data_order_held_or_running():
    s = scheduler_before_version_1()
    finish(s, 3, 1, 0)
    due = verification(1, *STEP_1[:2]), verification(1, *STEP_1[2:])
    assert s.on_event(WeightsPublished(1))[0] == InstallWeights("a", 1, due)
    assert not any(isinstance(c, VerifySamples) for c in installed(s, 1)), "commanded already"


def test_what_is_verified_before_the_install_is_reported_is_delivered_at_once():
    s = scheduler_before_version_1()
    finish(s, 2, 0, 0)  # held before the install is commanded
    s.on_event(WeightsPublished(1))
    finish(s, 2, 1, 0)  # finished under the old weights afterwards
    assert finish(s, 2, 0, 0) == [], "repeated"
    assert finish(s, 2, 0, 1) == []
    pair = tuple(("a", sample) for sample in STEP_1[:2])
    assert DeliverGroup(1, 2, pair) in finish(s, 2, 1, 1)
    assert finish(s, 2, 1, 1) == [], "repeated"
    assert not any(isinstance(c, VerifySamples) for c in installed(s, 1))


def test_a_report_that_no_commanded_verification_explains_changes_nothing():
    s = scheduler_before_version_1()
    finish(s, 2, 0, 0)
    finish(s, 2, 1, 0)
    before = s.snapshot()
    assert finish(s, 2, 1, 1) == []
    assert s.snapshot() == before


def test_samples_that_start_while_weights_are_installed_are_verified_afterwards():
    s = scheduler_before_version_1(slots=1)
    limit = s.state.generators["a"].limit
    running = s.state.generators["a"].running
    assert running == limit < 4
    (install,) = (c for c in s.on_event(WeightsPublished(1)) if isinstance(c, InstallWeights))
    named = {sample for due in install.verify for sample in due.samples}
    begun = [c.sample for c in finish(s, 2, 0, 0) if isinstance(c, StartSample)]
    assert begun
    assert not named & set(begun)
    commanded = [c for c in installed(s, 1) if isinstance(c, VerifySamples)]
    late = {sample for due in commanded for sample in due.samples}
    assert late == {sample for sample in begun if sample in STEP_1}


def test_a_step_may_be_trained_before_its_install_is_reported():
    s = scheduler_before_version_1()
    for sample in STEP_1:
        finish(s, sample.group, sample.sample, 0)
    s.on_event(WeightsPublished(1))
    for sample in STEP_1:
        finish(s, sample.group, sample.sample, 1)
    for sample in STEP_1:
        s.on_event(SampleDelivered("a", sample))
    s.on_event(StepFinished(1, (2, 3)))
    published = s.on_event(WeightsPublished(2))
    assert not any(isinstance(c, InstallWeights) for c in published), "one at a time"
    (install,) = (c for c in installed(s, 1) if isinstance(c, InstallWeights))
    assert [due.samples[0].group for due in install.verify] == [4, 5]
    assert {due.min_version for due in install.verify} == {2}
