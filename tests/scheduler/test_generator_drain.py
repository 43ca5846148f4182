from scheduler_of import acknowledge, finish, scheduler_of, starts

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.commands import (
    DeliverGroup,
    EndGenerator,
    InstallWeights,
    ReleaseSamples,
    StartSample,
)
from asyncrl.scheduler.events import (
    GeneratorJoined,
    GeneratorLeaves,
    GeneratorLost,
    SamplesReleased,
    StepFinished,
    WeightsPublished,
)

VERIFY = {"on_update": "verify", "max_off_policy_steps": 0, "max_runahead_groups": 3}


def ids(*samples):
    return tuple(SampleId(*sample) for sample in samples)


def test_what_a_leaver_has_moves_and_what_it_delivers_stays():
    s, _ = scheduler_of("a", slots=4, steps=4, **VERIFY)
    finish(s, "a", 0)  # is delivered
    finish(s, "a", 1, samples=[0])
    assert s.on_event(GeneratorJoined("b", 8, 0)) == []
    assert s.on_event(GeneratorLeaves("a")) == [
        ReleaseSamples("a", ids((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)))
    ]
    s.check()
    assert s.snapshot().waits[0] == (
        "a leaves and waits for 6 samples to move and the trainer to acknowledge 2 samples"
    )
    assert s.on_event(GeneratorLeaves("a")) == []
    assert finish(s, "a", 1, samples=[1]) == [], "it was finished before the command was read"
    moved = [(group, sample, group) for group in (1, 2, 3) for sample in (0, 1)]
    assert s.on_event(SamplesReleased("a")) == [
        StartSample("b", SampleId(group, sample), ahead) for group, sample, ahead in moved
    ]
    s.check()
    assert acknowledge(s, "a", 0)[-1] == EndGenerator("a")
    assert s.on_event(GeneratorLost("a")) == s.on_event(SamplesReleased("a")) == []
    assert list(s.state.generators) == ["b"]


def test_a_leaver_installs_nothing_and_one_without_samples_ends_at_once():
    s, _ = scheduler_of("a", slots=8, steps=2, on_update="keep", max_off_policy_steps=0)
    s.on_event(GeneratorJoined("b", 8, 0))
    assert s.on_event(GeneratorLeaves("b")) == [EndGenerator("b")]
    finish(s, "a", 0)
    acknowledge(s, "a", 0)
    s.on_event(StepFinished(0, (0,)))
    assert s.on_event(WeightsPublished(1)) == [InstallWeights("a", 1)]


def test_without_verification_a_leaver_finishes_what_it_has_begun():
    s, _ = scheduler_of(
        "a", slots=3, groups_per_step=4, max_off_policy_steps=0, max_in_flight_per_generator=3
    )
    s.on_event(GeneratorJoined("b", 2, 0))
    assert s.on_event(GeneratorLeaves("a")) == starts("b", (3, 0)), "nothing of it was begun"
    assert s.snapshot().waits[0] == "a leaves and waits for 3 samples to finish"
    pair = tuple(("a", sample) for sample in ids((0, 0), (0, 1)))
    assert finish(s, "a", 0) == [*starts("a", (1, 1)), DeliverGroup(0, 0, pair)]
    acknowledge(s, "a", 0)
    finish(s, "a", 1)
    assert acknowledge(s, "a", 1)[-1] == EndGenerator("a")


def test_a_move_is_no_attempt():
    s, _ = scheduler_of("a", slots=2, steps=2, max_attempts=1, **VERIFY)
    s.on_event(GeneratorJoined("b", 2, 0))
    for leaver, other in (("a", "b"), ("b", "c")):
        s.on_event(GeneratorJoined("c", 2, 0))
        s.on_event(GeneratorLeaves(leaver))
        moved = s.on_event(SamplesReleased(leaver))
        s.check()
        assert starts(other, (0, 0))[0] in moved
    assert s.state.ledger.counts().failed == 0


def test_one_that_leaves_before_it_joined_ends_and_gets_no_work():
    s, _ = scheduler_of("a", slots=2, steps=2, **VERIFY)
    assert s.on_event(GeneratorLeaves("b")) == [EndGenerator("b")]
    assert s.on_event(GeneratorJoined("b", 8, 0)) == s.on_event(GeneratorLeaves("b")) == []
    assert s.on_event(GeneratorLost("b")) == []
    assert list(s.state.generators) == ["a"]
    s.check()
