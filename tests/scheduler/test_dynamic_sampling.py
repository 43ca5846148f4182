"""Whole runs with dynamic sampling, in a fake world that keeps its own account of the groups."""

import random
import re
from itertools import pairwise

import pytest
from any_order import AnyOrder
from dynamic_world import DynamicWorld
from hypothesis import HealthCheck, settings
from scheduled_world import World, run_clocked

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.commands import DeliverGroup, ReportGroupWithoutSignal, RunOutcome
from asyncrl.scheduler.config import DynamicSamplingConfig, SchedulerConfig
from asyncrl.scheduler.scheduler import Scheduler


class AnyOrderOfRewards(AnyOrder):
    """Any order of everything, and of rewards: steps take groups with signal, in data order."""

    def make_world(self, config, key):
        sampling = DynamicSamplingConfig(enabled=True, max_batches=1 + config.max_attempts)
        changed = {"group_size": config.group_size + 1, "dynamic_sampling": sampling}
        return DynamicWorld(
            config.model_copy(update=changed), first_step=1, total_steps=5, group_key=key
        )


AnyOrderOfRewards.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrderOfRewards = AnyOrderOfRewards.TestCase


def dynamic_world(steps=5, seed=0, max_batches=10, with_signal=0.5, **more):
    sampling = DynamicSamplingConfig(enabled=True, max_batches=max_batches)
    config = SchedulerConfig(**{"group_size": 2, "groups_per_step": 4, **more})
    config = config.model_copy(update={"dynamic_sampling": sampling})
    return DynamicWorld(config, total_steps=steps, seed=seed, with_signal=with_signal)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("mode", ["verify", "keep"])
def test_each_step_has_its_groups_although_generators_and_trainers_are_lost(mode, bound):
    for seed in range(3):
        world = dynamic_world(
            seed=seed, on_update=mode, max_off_policy_steps=bound, max_attempts=50
        )
        rng = random.Random(seed)
        for slots in (3, 8):
            world.join(slots)
        world.trainer_joins()

        def disturb(world, _, rng=rng):
            if world.finished is None and rng.random() < 0.01:
                world.lose(min(world.generators), acks_lost=rng.random() < 0.5)
                world.join(5)
            if world.finished is None and world.trainer and rng.random() < 0.004:
                world.lose_trainer(unsaid=rng.random() < 0.5)
                world.trainer_joins(rng.randint(0, world.trained))

        run_clocked(world, rng, on_time=disturb)
        assert world.finished is RunOutcome.DONE
        assert len(world.consumed) == 20
        assert len(world.no_signal) > 5
        assert max(world.staleness) <= bound


def test_if_all_groups_carry_signal_the_steps_are_those_without_dynamic_sampling():
    """The same commands at the same times, and each group in the same step."""
    ended = []
    for is_dynamic in (False, True):
        sampling = DynamicSamplingConfig(enabled=is_dynamic)
        config = SchedulerConfig(group_size=2, groups_per_step=4, dynamic_sampling=sampling)
        kind = DynamicWorld if is_dynamic else World
        world = kind(config, total_steps=5, **({"with_signal": 1.0} if is_dynamic else {}))
        for slots in (3, 8):
            world.join(slots)
        world.trainer_joins()
        run_clocked(world, random.Random(1))
        ended.append(world.consumed)
    assert ended[0] == ended[1]


def test_a_step_with_too_few_groups_with_signal_trains_on_what_there_is():
    world = dynamic_world(with_signal=0.2, max_batches=2, seed=3, on_update="keep")
    world.join(8)
    world.trainer_joins()
    run_clocked(world, random.Random(0))
    sizes = [list(world.consumed.values()).count(step) for step in range(world.trained)]
    assert min(sizes) < 4
    assert max(end - start for start, end in pairwise(world.starts.values())) == 8


def test_a_run_without_any_signal_ends_and_says_why():
    world = dynamic_world(with_signal=0.0, max_batches=3)
    world.join(8)
    world.trainer_joins()
    run_clocked(world, random.Random(0))
    assert world.finished is RunOutcome.FAILED
    assert sorted(world.no_signal) == list(range(12)), "it looked at three batches"
    reason = world.scheduler.state.finished.reason
    assert re.search(r"none of the 12 groups of step 0 carries signal.*max_batches is 3", reason)


def told(scheduler, *happened):
    return [command for event in happened for command in scheduler.on_event(event)]


def test_a_group_that_may_not_be_needed_waits_for_those_before():
    """Steps of one group: group 1 is delivered when group 0 turns out to carry no signal."""
    sampling = DynamicSamplingConfig(enabled=True)
    config = SchedulerConfig(
        group_size=2, groups_per_step=1, max_off_policy_steps=1, dynamic_sampling=sampling
    )
    s = Scheduler(config, first_step=0, total_steps=3)
    told(s, events.GeneratorJoined("a", 8, 0), events.TrainerJoined(0))

    def finished(group, rewards):
        return [
            event
            for i, reward in enumerate(rewards)
            for event in (
                events.SampleFinished("a", SampleId(group, i), 5, 0),
                events.SampleRewarded("a", SampleId(group, i), reward),
            )
        ]

    kinds = DeliverGroup | ReportGroupWithoutSignal
    assert not [c for c in told(s, *finished(1, [0.0, 1.0])) if isinstance(c, kinds)]
    assert "1 of its" not in s.snapshot().waits[0]
    settled = [c for c in told(s, *finished(0, [1.0, 1.0])) if isinstance(c, kinds)]
    assert settled == [
        ReportGroupWithoutSignal(0, 0, 1.0),
        DeliverGroup(0, 1, (("a", SampleId(1, 0)), ("a", SampleId(1, 1)))),
    ]
    assert "left 1 out" in s.snapshot().waits[0]
    s.check()


def test_a_resumed_run_begins_after_the_groups_that_were_looked_at():
    sampling = DynamicSamplingConfig(enabled=True)
    config = SchedulerConfig(group_size=2, groups_per_step=4, dynamic_sampling=sampling)
    world = DynamicWorld(config, first_step=2, total_steps=4)
    world.scheduler = Scheduler(config, first_step=2, total_steps=4, first_groups={1: 6, 2: 13})
    world.starts = {1: 6, 2: 13}
    world.join(8)
    world.trainer_joins()
    run_clocked(world, random.Random(0))
    assert min([*world.consumed, *world.no_signal]) == 13


def test_a_step_that_waits_for_rewards_says_so():
    world = dynamic_world()
    world.join(8)
    world.trainer_joins()
    while finishing := [h for h in world.enabled() if h[0] in ("finish", "verified")]:
        world.happen(finishing[0])
    assert any("waits for the rewards of" in line for line in world.scheduler.snapshot().waits)
