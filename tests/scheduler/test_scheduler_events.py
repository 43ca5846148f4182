"""Single events: the commands that they yield, and which events are ignored or refused."""

import pytest
from scheduler_of import acknowledge, finish, scheduler_of, starts

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.commands import (
    DeclareStep,
    DeliverGroup,
    DiscardSamples,
    FinishRun,
    InstallWeights,
    PauseGenerator,
    ReportGroupFailed,
    ResumeGenerator,
    RunOutcome,
    StartSample,
)
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.errors import ImpossibleEvent, SchedulerError, SenderOutOfStep
from asyncrl.scheduler.events import (
    GeneratorJoined,
    GeneratorLost,
    PauseRequested,
    ResumeRequested,
    SampleDelivered,
    SampleFailed,
    SampleFinished,
    StepFinished,
    StepGivenUp,
    StopRequested,
    TrainerJoined,
    WeightsInstalled,
    WeightsPublished,
)
from asyncrl.scheduler.scheduler import Scheduler


def test_synchronous_run_event_by_event():
    s, commands = scheduler_of("a", max_off_policy_steps=0, steps=2)
    assert commands == starts("a", (0, 0), (0, 1))
    pair = (("a", SampleId(0, 0)), ("a", SampleId(0, 1)))
    assert finish(s, "a", 0) == [DeliverGroup(0, 0, pair)]
    assert acknowledge(s, "a", 0) == [DeclareStep(0, (0,))]
    assert s.on_event(StepFinished(0, (0,))) == []
    assert s.on_event(WeightsPublished(1)) == [InstallWeights("a", 1)]
    assert s.on_event(WeightsInstalled("a", 1)) == starts("a", (1, 0), (1, 1))
    finish(s, "a", 1, version=1)
    acknowledge(s, "a", 1)
    assert s.on_event(StepFinished(1, (1,))) == [FinishRun(RunOutcome.DONE)]
    assert s.snapshot().waits == ()
    assert s.on_event(WeightsPublished(2)) == [InstallWeights("a", 2)], "for the evaluation"


def test_asynchronous_run_starts_the_next_step_at_once():
    s, commands = scheduler_of("a", max_off_policy_steps=1)
    assert commands == starts("a", (0, 0), (0, 1), (1, 0), (1, 1))
    assert s.state.last_open_group // s.state.config.groups_per_step == 1


def test_weights_published_and_step_finished_may_arrive_in_either_order():
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    finish(s, "a", 0)
    acknowledge(s, "a", 0)
    assert s.on_event(WeightsPublished(1)) == [InstallWeights("a", 1)]
    assert s.on_event(WeightsInstalled("a", 1)) == [], "step 0 is not settled yet"
    assert s.on_event(StepFinished(0, (0,))) == starts("a", (1, 0), (1, 1))


def test_work_of_a_lost_generator_moves_and_its_late_events_change_nothing():
    s, _ = scheduler_of("a", "b", max_off_policy_steps=0)
    finish(s, "a", 0, samples=[0])
    assert s.on_event(GeneratorLost("a")) == starts("b", (0, 0), (0, 1))
    assert s.on_event(GeneratorLost("a")) == []
    assert finish(s, "a", 0) == []
    assert len(finish(s, "b", 0)) == 1


def test_an_acknowledgement_counts_after_the_loss():
    s, _ = scheduler_of("a", "b", max_off_policy_steps=0)
    finish(s, "a", 0)
    acknowledge(s, "a", 0, samples=[0])
    assert s.on_event(GeneratorLost("a")) == starts("b", (0, 1))
    commands = acknowledge(s, "a", 0, samples=[1])
    assert commands == [DiscardSamples("b", (SampleId(0, 1),)), DeclareStep(0, (0,))]
    assert acknowledge(s, "a", 0) == []


def test_only_what_the_trainer_lacks_is_delivered_after_a_loss():
    s, _ = scheduler_of("a", "b", max_off_policy_steps=0)
    finish(s, "a", 0)
    acknowledge(s, "a", 0, samples=[0])
    s.on_event(GeneratorLost("a"))
    assert finish(s, "b", 0, samples=[1]) == [DeliverGroup(0, 0, (("b", SampleId(0, 1)),))]
    assert acknowledge(s, "b", 0, samples=[1]) == [DeclareStep(0, (0,))]


def test_attempts_run_out():
    s, _ = scheduler_of("a", max_off_policy_steps=0, max_attempts=1, groups_per_step=2)
    finish(s, "a", 1)
    acknowledge(s, "a", 1)
    (report,) = [c for c in s.on_event(GeneratorLost("a")) if isinstance(c, ReportGroupFailed)]
    assert report.group == 0
    assert "started 1 times (scheduler.max_attempts)" in report.reason
    assert s.snapshot().waits[0] == "the groups wait for a generator to join"


def test_a_failed_sample_fails_its_group_and_the_step_continues_without_it():
    s, _ = scheduler_of("a", max_off_policy_steps=0, groups_per_step=2)
    finish(s, "a", 0, samples=[0])
    commands = s.on_event(SampleFailed("a", SampleId(0, 1), "reward raised"))
    assert commands[:2] == [
        DiscardSamples("a", (SampleId(0, 0), SampleId(0, 1))),
        ReportGroupFailed(0, "sample 0.1 of a: reward raised"),
    ]
    assert s.on_event(SampleFailed("a", SampleId(0, 1), "reward raised")) == []
    finish(s, "a", 1)
    assert acknowledge(s, "a", 1) == [DeclareStep(0, (1,))]


def test_a_step_without_groups_ends_the_run_once_the_steps_before_it_are_trained():
    s, _ = scheduler_of("a", max_off_policy_steps=1)
    commands = s.on_event(SampleFailed("a", SampleId(1, 0), "reward raised"))
    assert not any(isinstance(c, FinishRun) for c in commands)
    finish(s, "a", 0)
    acknowledge(s, "a", 0)
    assert s.on_event(StepFinished(0, (0,))) == [
        FinishRun(RunOutcome.FAILED, "every group of step 1 failed")
    ]


def test_one_install_at_a_time_then_the_latest():
    s, _ = scheduler_of("a", "slow", max_off_policy_steps=2, steps=5)
    for step in range(2):
        owner = s.state.groups[step].owner.name
        finish(s, owner, step)
        acknowledge(s, owner, step)
        s.on_event(StepFinished(step, (step,)))
        s.on_event(WeightsPublished(step + 1))
    commands = s.on_event(WeightsInstalled("slow", 1))
    assert InstallWeights("slow", 2) in commands
    assert "policy version 1 waits to be installed by a" in s.snapshot().waits


def test_overwritten_weights_are_installed_again_only_when_newer_ones_are_published():
    s, _ = scheduler_of("a", max_off_policy_steps=1, steps=5)
    for step in range(2):
        finish(s, "a", step)
        acknowledge(s, "a", step)
    s.on_event(StepFinished(0, (0,)))
    s.on_event(WeightsPublished(1))
    assert s.on_event(WeightsInstalled("a", 0)) == [], "step 1 is being trained: overwritten"
    s.on_event(StepFinished(1, (1,)))
    assert s.on_event(WeightsPublished(2))[0] == InstallWeights("a", 2)
    assert s.on_event(WeightsInstalled("a", 0)) == [], "repeated: nothing newer exists yet"
    assert "policy version 2 waits to be installed by a" in s.snapshot().waits
    assert s.on_event(WeightsInstalled("a", 2)) != []


def test_pause_starts_no_samples_and_resume_continues():
    s, _ = scheduler_of("a", slots=1, max_off_policy_steps=0, groups_per_step=4)
    assert s.on_event(PauseRequested()) == [PauseGenerator("a")]
    assert s.on_event(PauseRequested()) == []
    assert finish(s, "a", 0, samples=[0]) == []
    assert s.on_event(GeneratorJoined("b", 2, 0)) == [PauseGenerator("b")]
    assert "paused" in s.snapshot().waits[0]
    commands = s.on_event(ResumeRequested())
    assert commands[0] == ResumeGenerator("a")
    assert ResumeGenerator("b") in commands
    assert StartSample("a", SampleId(1, 0)) in commands


def test_stop_finishes_the_current_step_and_withdraws_the_next():
    s, _ = scheduler_of("a", max_off_policy_steps=1)
    commands = s.on_event(StopRequested())
    assert commands == [DiscardSamples("a", (SampleId(1, 0), SampleId(1, 1)))]
    assert s.on_event(SampleFinished("a", SampleId(1, 0), 5, 0)) == [], "late"
    finish(s, "a", 0)
    acknowledge(s, "a", 0)
    assert s.on_event(StepFinished(0, (0,))) == [FinishRun(RunOutcome.STOPPED)]
    assert s.on_event(StopRequested()) == []


def test_stop_finishes_the_declared_steps():
    s, _ = scheduler_of("a", max_off_policy_steps=2)
    for group in (0, 1):
        finish(s, "a", group)
        acknowledge(s, "a", group)
    assert s.on_event(StopRequested()) == [DiscardSamples("a", (SampleId(2, 0), SampleId(2, 1)))]
    assert s.on_event(GeneratorLost("a")) == []
    assert s.on_event(StepFinished(0, (0,))) == []
    assert s.on_event(StepFinished(1, (1,))) == [FinishRun(RunOutcome.STOPPED)]


def test_stop_ends_at_once_if_nothing_was_started_or_no_generator_is_left():
    s, _ = scheduler_of(max_off_policy_steps=0)
    assert s.on_event(StopRequested()) == [FinishRun(RunOutcome.STOPPED)]
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    s.on_event(StopRequested())
    (finished,) = s.on_event(GeneratorLost("a"))
    assert finished.outcome is RunOutcome.STOPPED
    assert finished.reason.startswith("step 0 was not trained")


def test_a_stopping_run_gives_up_a_step_whose_rewards_do_not_come():
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    finish(s, "a", 0)
    assert s.on_event(StepGivenUp("too early")) == [], "the run does not stop"
    s.on_event(StopRequested())
    discard, finished = s.on_event(StepGivenUp("score hangs"))
    assert isinstance(discard, DiscardSamples)
    assert finished == FinishRun(RunOutcome.STOPPED, "step 0 was not trained: score hangs")
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    finish(s, "a", 0)
    acknowledge(s, "a", 0)
    s.on_event(StopRequested())
    assert s.on_event(StepGivenUp("late")) == [], "the trainer has the whole step"


def test_what_each_wait_waits_for():
    config = SchedulerConfig(group_size=2, groups_per_step=1, on_update="keep")
    s = Scheduler(config, first_step=0, total_steps=3)
    assert s.snapshot().waits == ("the run waits for the trainer to join",)
    s.on_event(TrainerJoined(0))
    assert s.snapshot().waits[0] == "the groups wait for a generator to join"
    s.on_event(GeneratorJoined("a", 4, 0))
    running, closed = s.snapshot().waits
    assert running == "step 0 waits for 2 samples (2 running, 0 to be started)"
    assert closed.startswith("step 1 waits for policy version 1 to be published")
    finish(s, "a", 0)
    assert s.snapshot().waits[0] == "step 0 waits for the trainer to acknowledge 2 samples"
    assert s.snapshot().unrewarded == 0
    slow = s.snapshot(1, " (score, 12 s)")  # the generator says that one reward is not there
    assert slow.waits[:2] == (
        "step 0 waits for the rewards of 1 sample (score, 12 s)",
        "step 0 waits for the trainer to acknowledge 1 sample",
    )
    assert slow.unrewarded == 1
    acknowledge(s, "a", 0)
    assert s.snapshot().waits[0] == "step 0 waits for the trainer to finish it"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (SampleFinished("x", SampleId(0, 0), 1, 0), "generator x, which never joined"),
        (SampleFinished("a", SampleId(9, 0), 1, 0), "never issued"),
        (SampleFinished("a", SampleId(0, 2), 1, 0), "groups have 2 samples"),
        (SampleFinished("a", SampleId(0, 0), 1, -1), "tokens of policy version -1"),
        (SampleFinished("a", SampleId(0, 0), 1, 1), "tokens of policy version 1"),
        (SampleDelivered("a", SampleId(0, 0)), "was not ordered to deliver"),
        (GeneratorJoined("a", 9, 0), "needs a new name"),
        (GeneratorJoined("b", 0, 0), "0 slots"),
        (GeneratorJoined("b", 1, 1), "latest published version is 0"),
        (WeightsInstalled("a", 1), "never published"),
        (WeightsPublished(1), "cannot have been trained"),
        (StepFinished(0, (0,)), "before all its groups"),
        (StepFinished(1, (1,)), "out of order"),
    ],
)
def test_impossible_events_are_refused_and_change_nothing(event, message):
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    before = s.snapshot()
    with pytest.raises(ImpossibleEvent, match=message):
        s.on_event(event)
    assert s.snapshot() == before
    s.check()


def test_a_trainer_of_another_version_is_refused():
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    assert s.on_event(TrainerJoined(0)) == [], "repeated"
    with pytest.raises(SenderOutOfStep, match="version 0 is expected"):
        s.on_event(TrainerJoined(1, lineage=1))
    other = Scheduler(SchedulerConfig(), first_step=2, total_steps=3)
    with pytest.raises(SenderOutOfStep, match="version 2 is expected"):
        other.on_event(TrainerJoined(0))


def test_a_name_is_never_used_again():
    s, _ = scheduler_of("a", "b", max_off_policy_steps=0)
    assert s.on_event(GeneratorJoined("a", 4, 0)) == [], "again"
    s.on_event(GeneratorLost("a"))
    assert s.on_event(GeneratorJoined("a", 4, 0)) == []
    assert list(s.state.generators) == ["b"]


def test_a_generator_may_be_lost_before_it_is_known_to_have_joined():
    s, _ = scheduler_of(max_off_policy_steps=0)
    assert s.on_event(GeneratorLost("a")) == []
    assert s.on_event(GeneratorJoined("a", 4, 0)) == []
    assert s.state.generators == {}


def test_a_step_consumed_with_other_groups_is_refused():
    s, _ = scheduler_of("a", max_off_policy_steps=0)
    finish(s, "a", 0)
    acknowledge(s, "a", 0)
    with pytest.raises(SenderOutOfStep, match=r"members are \[0\]"):
        s.on_event(StepFinished(0, (0, 1)))


@pytest.mark.parametrize(("first", "total"), [(-1, 2), (2, 2)])
def test_a_run_needs_at_least_one_step(first, total):
    with pytest.raises(SchedulerError, match="total_steps"):
        Scheduler(SchedulerConfig(), first_step=first, total_steps=total)
