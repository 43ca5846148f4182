"""A trainer is lost, and another one continues from an older version.

`test_scheduler_runs` has the property test in which this happens at any moment.
"""

import random

import pytest
from scheduled_world import make_world, run_clocked

from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId
from asyncrl.scheduler.commands import (
    DeclareStep,
    DeliverGroup,
    DiscardSamples,
    FinishRun,
    InstallWeights,
    RewindGenerator,
    RunOutcome,
    StartSample,
    VerifySamples,
)
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.errors import LedgerError, SchedulerError
from asyncrl.scheduler.events import (
    GeneratorJoined,
    GeneratorLost,
    GeneratorRewound,
    SampleDelivered,
    SampleFinished,
    StepFinished,
    StopRequested,
    TrainerJoined,
    TrainerLost,
    WeightsInstalled,
    WeightsPublished,
)
from asyncrl.scheduler.ledger import Ledger
from asyncrl.scheduler.scheduler import Scheduler


def scheduler_after_one_step(**settings):
    """Generator `a` at version 1, step 0 trained; groups of one sample, steps of one group.

    Groups 1, 2 and 3 are running.
    """
    verify = {"on_update": "verify", "max_runahead_groups": 2, "max_off_policy_steps": 0}
    config = SchedulerConfig(**{"group_size": 1, "groups_per_step": 1, **verify, **settings})
    s = Scheduler(config, first_step=0, total_steps=9)
    s.on_event(TrainerJoined(0))
    s.on_event(GeneratorJoined("a", 4, 0))
    deliver(s, 0, 0)
    s.on_event(StepFinished(0, (0,)))
    s.on_event(WeightsPublished(1))
    s.on_event(WeightsInstalled("a", 1))
    s.check()
    return s


def finish(s, group, version, generator="a"):
    commands = s.on_event(SampleFinished(generator, SampleId(group, 0), 5, version))
    s.check()
    return commands


def deliver(s, group, version, generator="a"):
    finish(s, group, version, generator)
    return s.on_event(SampleDelivered(generator, SampleId(group, 0)))


def lose_trainer(s, version, lineage=1):
    assert s.on_event(TrainerLost()) == []
    s.check()
    commands = s.on_event(TrainerJoined(version, lineage))
    s.check()
    return commands


def rewound(s, version, lineage=1, generator="a"):
    commands = s.on_event(GeneratorRewound(generator, lineage, version))
    s.check()
    return commands


def test_what_was_consumed_is_generated_again_and_unfinished_work_is_kept():
    s = scheduler_after_one_step()
    finish(s, 3, 1)
    assert lose_trainer(s, 0) == [RewindGenerator("a", 0, 1)]
    assert s.on_event(TrainerJoined(0, 1)) == [], "repeated"
    assert s.on_event(WeightsInstalled("a", 1)) == [], "an installation before the rewind"
    assert rewound(s, -1, lineage=0) == [], "the answer to an earlier rewind"
    install, start = rewound(s, -1)
    assert install == InstallWeights("a", 0)
    assert start == StartSample("a", SampleId(0, 0), 1), "as of unknown weights: it runs ahead"
    # Nothing is due under version 0 but group 0, which has no token.
    assert s.on_event(WeightsInstalled("a", 0)) == [VerifySamples("a", (SampleId(0, 0),), 0)]
    assert finish(s, 0, 0) == [DeliverGroup(0, 0, (("a", SampleId(0, 0)),))]
    assert s.on_event(SampleDelivered("a", SampleId(0, 0))) == [DeclareStep(0, (0,))]
    s.on_event(StepFinished(0, (0,)))
    due = VerifySamples("a", (SampleId(1, 0),), 1)
    assert s.on_event(WeightsPublished(1)) == [InstallWeights("a", 1, (due,))]
    assert s.on_event(WeightsInstalled("a", 1)) == []
    s.check()


def test_a_sample_that_finished_before_the_rewind_is_verified_when_due():
    s = scheduler_after_one_step()
    lose_trainer(s, 0)
    assert finish(s, 1, 1) == [], "version 1 is gone, and version 1 will be another policy"
    rewound(s, -1)
    s.on_event(WeightsInstalled("a", 0))
    deliver(s, 0, 0)
    s.on_event(StepFinished(0, (0,)))
    due = VerifySamples("a", (SampleId(1, 0),), 1)
    assert s.on_event(WeightsPublished(1)) == [InstallWeights("a", 1, (due,))]
    assert s.on_event(WeightsInstalled("a", 1)) == []
    assert finish(s, 1, UNKNOWN_VERSION) == [], "sent before it was verified"
    assert finish(s, 1, 1) == [DeliverGroup(1, 1, (("a", SampleId(1, 0)),))]


def test_what_the_lost_trainer_had_is_generated_again():
    s = scheduler_after_one_step()
    finish(s, 1, 1)  # delivery is commanded
    commands = lose_trainer(s, 1)
    assert commands[0] == DiscardSamples("a", (SampleId(1, 0),))
    assert s.on_event(SampleDelivered("a", SampleId(1, 0))) == [], "to the lost trainer"
    assert StartSample("a", SampleId(1, 0)) in rewound(s, 1)
    assert deliver(s, 1, 1) == [DeclareStep(1, (1,))]


def test_nothing_is_delivered_while_there_is_no_trainer():
    s = scheduler_after_one_step()
    s.on_event(TrainerLost())
    assert s.snapshot().waits == (
        "the run waits for another trainer to join in place of the lost one",
    )
    assert finish(s, 1, 1) == []
    assert s.on_event(WeightsInstalled("a", 1)) == []
    s.on_event(TrainerJoined(1, 1))
    assert rewound(s, 1) == [VerifySamples("a", (SampleId(1, 0),), 1)]
    assert finish(s, 1, 1) == [DeliverGroup(1, 1, (("a", SampleId(1, 0)),))], "it needed none"


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_modes_that_cannot_verify_discard_their_work_if_a_version_is_gone(mode):
    ahead = {"on_update": mode, "max_runahead_groups": None, "max_off_policy_steps": 1}
    s = scheduler_after_one_step(**ahead)
    assert lose_trainer(s, 1) == [RewindGenerator("a", 1, 1)]
    assert rewound(s, 1) == [], "groups 1 and 2 are running"
    s.on_event(TrainerLost())
    discard, rewind = s.on_event(TrainerJoined(0, 2))
    assert discard == DiscardSamples("a", (SampleId(1, 0), SampleId(2, 0)))
    assert rewind == RewindGenerator("a", 0, 2)


def test_a_late_acknowledgement_of_a_lost_generator_is_the_lost_trainers():
    s = scheduler_after_one_step()
    finish(s, 1, 1)
    s.on_event(GeneratorJoined("b", 4, 1))
    s.on_event(GeneratorLost("a"))
    lose_trainer(s, 1)
    rewound(s, 1, generator="b")
    finish(s, 1, 1, "b")
    assert s.on_event(SampleDelivered("a", SampleId(1, 0))) == []
    assert s.on_event(SampleDelivered("b", SampleId(1, 0))) == [DeclareStep(1, (1,))]


def test_a_generator_that_was_lost_before_it_answered_never_counts_again():
    s = scheduler_after_one_step()
    finish(s, 1, 1)
    s.on_event(GeneratorJoined("b", 4, 1))
    lose_trainer(s, 1)
    s.on_event(GeneratorLost("a"))
    rewound(s, 1, generator="b")
    finish(s, 1, 1, "b")
    assert s.on_event(SampleDelivered("a", SampleId(1, 0))) == []


def test_a_step_that_the_trainer_finished_and_did_not_report_is_consumed():
    s = scheduler_after_one_step()
    deliver(s, 1, 1)  # step 1 is declared
    s.on_event(TrainerLost())
    assert s.on_event(TrainerJoined(2, 1)) == [RewindGenerator("a", 2, 1)]
    assert s.state.step == 2
    with pytest.raises(SchedulerError, match="version 2 is expected"):
        s.on_event(TrainerJoined(4, 2))


def test_a_stopping_run_does_not_wait_for_another_trainer():
    s = scheduler_after_one_step()
    s.on_event(StopRequested())
    (discard, finished) = s.on_event(TrainerLost())
    assert isinstance(discard, DiscardSamples)
    assert finished.outcome is RunOutcome.STOPPED
    assert finished.reason.startswith("step 1 was not trained, since the trainer was lost")
    s = scheduler_after_one_step()
    s.on_event(TrainerLost())
    assert s.on_event(StopRequested())[-1] == FinishRun(RunOutcome.STOPPED)


def test_a_run_whose_last_steps_are_gone_is_not_done():
    config = SchedulerConfig(group_size=1, groups_per_step=1, on_update="keep")
    s = Scheduler(config, first_step=0, total_steps=1)
    s.on_event(TrainerJoined(0))
    s.on_event(GeneratorJoined("a", 4, 0))
    deliver(s, 0, 0)
    assert s.on_event(StepFinished(0, (0,))) == [FinishRun(RunOutcome.DONE)]
    s.on_event(WeightsPublished(1))
    s.on_event(TrainerLost())
    # Its last checkpoint holds every step. What the lost trainer published was removed.
    assert s.on_event(TrainerJoined(1, 1)) == [InstallWeights("a", 1)]
    s.on_event(TrainerLost())
    assert s.on_event(TrainerJoined(0, 2)) == [RewindGenerator("a", 0, 2)]
    s.on_event(GeneratorRewound("a", 2, -1))
    s.on_event(WeightsInstalled("a", 0))
    deliver(s, 0, 0)
    assert s.on_event(StepFinished(0, (0,))) == [FinishRun(RunOutcome.DONE)]


def test_a_generator_that_joined_without_a_trainer_gets_the_final_weights():
    s = Scheduler(SchedulerConfig(group_size=1, groups_per_step=1), first_step=0, total_steps=1)
    s.on_event(TrainerJoined(0))
    s.on_event(GeneratorJoined("a", 4, 0))
    s.on_event(GeneratorJoined("b", 4, 0))
    deliver(s, 0, 0)
    s.on_event(WeightsPublished(1))
    s.on_event(StepFinished(0, (0,)))
    s.on_event(TrainerLost())
    s.on_event(GeneratorLost("a"))
    assert s.on_event(GeneratorJoined("a.1", 4, 0)) == []
    # `b` was told to install what the lost trainer removed.
    assert s.on_event(TrainerJoined(1, 1)) == [InstallWeights("b", 1), InstallWeights("a.1", 1)]
    assert s.state.step == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_off_policy_steps": 0},
        {"max_off_policy_steps": 2},
        {"max_off_policy_steps": 1, "on_update": "recompute"},
        {"max_off_policy_steps": 0, "on_update": "verify"},
        {"max_off_policy_steps": 1, "on_update": "verify", "max_runahead_groups": 1},
        {"max_off_policy_steps": 0, "on_update": "verify", "partial_rollout": False},
    ],
)
def test_every_group_is_consumed_once_by_the_steps_that_count(settings):
    rewinds = 0
    for seed in range(4):
        world = make_world(steps=8, **settings)
        for slots in (3, 8, 1):
            world.join(slots)
        world.trainer_joins()
        rng = random.Random(seed)
        losses = [6.0, 9.0, 22.0, 23.0]

        def disturb(w, now, losses=losses, rng=rng):
            if losses and now > losses[0] and w.finished is None:
                losses.pop(0)
                w.lose_trainer(unsaid=rng.random() < 0.3)
                if rng.random() < 0.3:
                    w.lose(rng.choice(sorted(w.generators)), acks_lost=False)
                    w.join(4, version=0)
                w.trainer_joins(rng.randint(0, w.trained))
                w.check()

        run_clocked(world, rng, on_time=disturb)
        assert world.finished is RunOutcome.DONE
        assert not world.failed
        rewinds += world.rewinds
    assert rewinds == 16


def test_the_ledger_returns_to_an_earlier_step():
    ledger = Ledger(groups_per_step=2, first_step=1)
    for step in (1, 2):
        first, second = ledger.issue(), ledger.issue()
        ledger.arrive(first)
        (ledger.fail if step == 2 else ledger.arrive)(second)
        ledger.consume(step, ledger.membership(step))
    ledger.issue()
    with pytest.raises(LedgerError, match="cannot return to step 4"):
        ledger.rewind(4)
    ledger.rewind(2)
    assert ledger.counts() == (2, 0, 2, 0, 0)
    assert (ledger.issue(), ledger.issued_below) == (4, 7)
    ledger.rewind(0)  # before the step that this process began with
    assert ledger.counts() == (0, 0, 0, 0, 0)
