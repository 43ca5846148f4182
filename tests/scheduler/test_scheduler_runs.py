"""Whole runs of the scheduler in a fake world that asserts on every command.

`World` carries out commands and knows what can happen next. It is driven in two ways: by a clock
(random durations, to the end of the run) and by hypothesis (any order of completions, losses,
joins, duplicates and failures).
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled_world import World, make_world, run_clocked

from rollout.trajectory import SampleId
from scheduler import events
from scheduler.commands import RunOutcome
from scheduler.config import SchedulerConfig


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_runs_to_the_end_in_order(bound, seed):
    world = make_world(max_off_policy_steps=bound)
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    run_clocked(world, random.Random(seed))
    assert world.finished is RunOutcome.DONE
    assert not world.failed
    assert max(world.staleness) <= bound
    if bound == 0:
        assert set(world.staleness) == {0}


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("ahead", [1, 6, 15])
def test_verify_runs_ahead_and_trains_on_nothing_too_old(bound, ahead):
    world = make_world(
        max_off_policy_steps=bound, on_update="verify", max_runahead_groups=ahead, steps=6
    )
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    furthest = 0

    def look(world, _):
        nonlocal furthest
        furthest = max(furthest, max(world.placed, default=0) // 6 - world.trained)

    run_clocked(world, random.Random(1), on_time=look)
    assert world.finished is RunOutcome.DONE
    assert not world.failed
    assert set(world.staleness) == set(range(bound + 1))
    assert world.verified > 0
    assert furthest == bound + -(-ahead // 6), "it did not run ahead as far as it may"


@pytest.mark.parametrize("mode", ["keep", "verify"])
def test_without_partial_rollouts_each_sample_has_one_version(mode):
    world = make_world(max_off_policy_steps=1, on_update=mode, steps=6, partial_rollout=False)
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    lines = set()

    def look(world, _):
        lines.update(w for w in world.scheduler.snapshot().waits if "partial_rollout" in w)

    run_clocked(world, random.Random(1), on_time=look)
    assert world.finished is RunOutcome.DONE
    assert not world.failed
    assert any("to finish the running samples" in line for line in lines)


def test_a_generator_with_a_full_kv_space_starts_no_run_ahead():
    world = make_world(max_off_policy_steps=0, on_update="verify", steps=3, runahead_kv_limit=0.5)
    name = world.join(4)
    world.fill(name, 0.5)
    world.trainer_joins()
    while any(g.running for g in world.generators.values()):
        finishing = [h for h in world.enabled() if h[0] == "finish"]
        world.happen(finishing[0])
        world.check()
    assert max(world.placed) == 5, "no run-ahead, although there are idle slots"
    world.fill(name, 0.49)
    assert len(world.generators[name].running) == world.generators[name].limit


def test_verify_without_staleness_is_faster_than_synchronous():
    times = {}
    for mode in ("keep", "verify"):
        world = make_world(max_off_policy_steps=0, on_update=mode, steps=8)
        for slots in (8, 8):
            world.join(slots)
        world.trainer_joins()
        times[mode] = run_clocked(world, random.Random(3))
        assert set(world.staleness) == {0}
    assert times["verify"] < 0.85 * times["keep"]  # simulated time


def test_asynchronous_is_faster_than_synchronous_and_runs_ahead():
    times = {}
    for bound in (0, 1):
        world = make_world(max_off_policy_steps=bound, steps=8)
        for _ in range(2):
            world.join(4)
        world.trainer_joins()
        times[bound] = run_clocked(world, random.Random(5))
    assert max(world.staleness) == 1
    assert times[1] < 0.8 * times[0]


def test_a_generator_that_installs_slowly_skips_versions_and_the_run_ends():
    world = make_world(max_off_policy_steps=2, steps=10)
    world.join(4)
    world.join(4)
    world.trainer_joins()

    def slow(h):
        return 3000.0 if h[:2] in (("install", "g1"), ("report", "g1")) else 1.0

    run_clocked(world, random.Random(1), slow=slow)
    installed = [e.policy_version for e in world.history if isinstance(e, events.WeightsInstalled)
                 and e.generator == "g1"]  # fmt: skip
    assert world.finished is RunOutcome.DONE
    assert len(installed) < 9
    assert installed == sorted(installed)


def test_a_straggler_blocks_only_its_own_slot():
    world = make_world(max_off_policy_steps=0, steps=1, groups_per_step=8, group_size=2)
    world.join(2)
    world.trainer_joins()
    straggler = ("finish", "g0", SampleId(0, 0))
    for _ in range(100):
        others = [h for h in world.enabled() if h != straggler]
        if not others:
            break
        world.happen(others[0])
    assert [s for g in world.generators.values() for s in g.running] == [SampleId(0, 0)]
    assert world.scheduler.snapshot().groups_waiting == 7


def test_losses_and_late_joins_in_a_clocked_run():
    for seed in range(4):
        world = make_world(max_off_policy_steps=1, steps=6)
        world.join(4)
        world.join(4)
        world.trainer_joins()
        rng = random.Random(seed)
        losses = [5.0, 12.0, 13.0]

        def disturb(w, now, losses=losses, rng=rng):
            if losses and now > losses[0] and w.finished is None:
                losses.pop(0)
                w.lose(rng.choice(sorted(w.generators)), acks_lost=rng.random() < 0.5)
                w.join(4, version=0)
                w.check()

        run_clocked(world, rng, on_time=disturb)
        assert world.finished is RunOutcome.DONE
        assert not world.failed


def test_a_prompt_returns_to_its_generator_in_the_next_epoch():
    config = SchedulerConfig(group_size=2, groups_per_step=8, on_update="keep")
    world = World(config, total_steps=6, group_key=lambda group: group % 8)
    world.join(8)
    world.join(8)
    world.trainer_joins()
    run_clocked(world, random.Random(0))
    same = [world.placed[g] == world.placed[g - 8] for g in range(8, 48)]
    assert sum(same) >= 0.8 * len(same)
    assert {world.placed[g] for g in range(8)} == {"g0", "g1"}


@pytest.mark.parametrize("kept", [0, 2])
def test_a_drained_run_trains_the_steps_that_are_begun_and_begins_nothing(kept):
    """With bound 2 and room for all samples, steps 0 to 2 are begun; with room for 2, one group."""
    world = make_world(max_off_policy_steps=2, steps=9, groups_per_step=2, group_size=2)
    world.join(12 if kept else 1)
    world.trainer_joins()
    begun = set(world.placed)
    world.drain()
    run_clocked(world, random.Random(1))
    assert world.finished is RunOutcome.STOPPED
    assert set(world.placed) == begun
    assert world.trained == (kept + 1 if kept else 0)
    assert set(world.consumed) == (begun if kept else set())


def test_bounds_change_from_the_first_step_that_nothing_is_begun_of():
    """One policy step of staleness, then none with run-ahead, then none without."""
    world = make_world(on_update="verify", max_off_policy_steps=1, max_runahead_groups=1, steps=12)
    for slots in (3, 8, 1):
        world.join(slots)
    world.trainer_joins()
    keep = {"on_update": "keep", "max_runahead_groups": None}
    orders = [
        {"max_off_policy_steps": 0, "max_runahead_groups": 6},
        keep | {"max_off_policy_steps": 0},
        keep | {"max_off_policy_steps": 3},
    ]

    def order(world, _):
        if orders and world.trained >= 3 * (4 - len(orders)) - 2:
            world.change(world.config.model_copy(update=orders.pop(0)))

    run_clocked(world, random.Random(2), on_time=order)
    assert world.finished is RunOutcome.DONE
    assert len(world.changes) == 3
    assert not orders
    assert not world.failed


def test_a_resumed_run_begins_at_its_step():
    config = SchedulerConfig(group_size=2, groups_per_step=3, on_update="keep")
    world = World(config, first_step=3, total_steps=5)
    world.join(4, version=-1)
    world.trainer_joins()
    assert world.generators["g0"].install == 3
    run_clocked(world, random.Random(0))
    assert sorted(world.consumed) == list(range(9, 15))


REPEATABLE = (
    events.GeneratorJoined
    | events.GeneratorLost
    | events.GeneratorLeaves
    | events.SamplesReleased
    | events.SampleFinished
    | events.SampleFailed
    | events.SampleDelivered
    | events.WeightsPublished
    | events.StepFinished
)


class AnyOrder(RuleBasedStateMachine):
    """Any order of completions, losses, joins, leaves, failures, duplicates, stops and rewinds."""

    @initialize(
        bound=st.integers(0, 2),
        size=st.integers(1, 3),
        per_step=st.integers(1, 3),
        attempts=st.integers(1, 3),
        limit=st.sampled_from([None, None, 1, 3]),
        epochs=st.booleans(),
        ahead=st.sampled_from([None, 1, 2, 5]),
        partial=st.booleans(),
    )
    def begin(self, bound, size, per_step, attempts, limit, epochs, ahead, partial):
        config = SchedulerConfig(
            partial_rollout=partial,
            on_update="keep" if ahead is None else "verify",
            max_runahead_groups=ahead,
            max_off_policy_steps=bound,
            group_size=size,
            groups_per_step=per_step,
            max_attempts=attempts,
            max_in_flight_per_generator=limit,
        )
        key = (lambda group: group % 3) if epochs else None
        self.world = World(config, first_step=1, total_steps=5, group_key=key)
        self.world.overwrites = True

    @precondition(lambda self: not self.world.trainer)
    @rule(data=st.data())
    def trainer_joins(self, data):
        """The first one, or one that continues from a checkpoint that may be older."""
        world = self.world
        if world.finished in (None, RunOutcome.DONE):
            world.trainer_joins(data.draw(st.integers(world.first_step, world.trained)))

    @precondition(lambda self: self.world.trainer and self.world.rewinds < 4)
    @rule(unsaid=st.booleans(), odds=st.integers(0, 2))
    def trainer_is_lost(self, unsaid, odds):
        if odds == 0:
            self.world.lose_trainer(unsaid=unsaid)

    @precondition(lambda self: len(self.world.generators) < 4)
    @rule(slots=st.integers(1, 5), lag=st.integers(0, 3))
    def generator_joins(self, slots, lag):
        self.world.join(slots, version=max(0, self.world.published - lag))

    @precondition(lambda self: self.world.generators)
    @rule(data=st.data(), acks_lost=st.booleans())
    def generator_is_lost(self, data, acks_lost):
        self.world.lose(
            data.draw(st.sampled_from(sorted(self.world.generators))), acks_lost=acks_lost
        )

    @precondition(lambda self: self.world.generators)
    @rule(data=st.data())
    def generator_leaves(self, data):
        self.world.leave(data.draw(st.sampled_from(sorted(self.world.generators))))

    @precondition(lambda self: self.world.generators)
    @rule(data=st.data(), share=st.sampled_from([0.0, 0.89, 0.9, 1.0]))
    def kv_space_is_used(self, data, share):
        self.world.fill(data.draw(st.sampled_from(sorted(self.world.generators))), share)

    @precondition(lambda self: self.world.generators)
    @rule(data=st.data(), speed=st.sampled_from([0.0, 1.0, 4.0, 1000.0]))
    def speed_is_measured(self, data, speed):
        name = data.draw(st.sampled_from(sorted(self.world.generators)))
        self.world.tell(events.SpeedMeasured(name, speed))

    @precondition(lambda self: self.world.enabled())
    @rule(data=st.data(), times=st.integers(1, 12))
    def things_happen(self, data, times):
        for _ in range(times):
            if enabled := self.world.enabled():
                self.world.happen(enabled[data.draw(st.integers(0, len(enabled) - 1))])

    @precondition(lambda self: any(g.running for g in self.world.generators.values()))
    @rule(data=st.data())
    def sample_fails(self, data):
        running = [(g.name, s) for g in self.world.generators.values() for s in g.running]
        self.world.fail(*data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.world.history)
    @rule(data=st.data())
    def an_event_is_repeated(self, data):
        """A repeated event yields no command, whenever it arrives."""
        repeatable = [e for e in self.world.history[-30:] if isinstance(e, REPEATABLE)]
        if repeatable:
            event = data.draw(st.sampled_from(repeatable))
            assert self.world.scheduler.on_event(event) == []

    @rule(pause=st.booleans())
    def pause_or_resume(self, pause):
        self.world.tell(events.PauseRequested() if pause else events.ResumeRequested())

    @precondition(lambda self: self.world.lineage >= 0)
    @rule(odds=st.integers(0, 9))
    def user_stops(self, odds):
        if odds == 0:
            self.world.tell(events.StopRequested())
        elif odds == 1:
            self.world.drain()

    @precondition(lambda self: len(self.world.changes) < 3)
    @rule(bound=st.integers(0, 3), ahead=st.sampled_from([None, 1, 2, 5]))
    def bounds_change(self, bound, ahead):
        mode = "verify" if ahead and self.world.verifies else "keep"
        changed = {"max_off_policy_steps": bound, "on_update": mode, "max_runahead_groups": None}
        if mode == "verify":
            changed["max_runahead_groups"] = ahead
        self.world.change(self.world.config.model_copy(update=changed))

    @invariant()
    def state_is_consistent(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """Whatever happened before, the run ends if nothing else goes wrong."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if not world.trainer and world.finished in (None, RunOutcome.DONE):
            world.trainer_joins()
        world.tell(events.ResumeRequested())
        for name in list(world.generators):
            world.fill(name, 0.0)
        rng = random.Random(0)
        for _ in range(3000):
            if world.finished is not None:
                break
            if world.leavers.issuperset(world.generators):
                world.join(2)
            enabled = world.enabled()
            assert enabled, f"deadlock: {world.scheduler.snapshot().waits}"
            world.happen(rng.choice(enabled))
        assert world.finished is not None, "starvation"
        world.check()
        world.check_result()


AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = AnyOrder.TestCase
