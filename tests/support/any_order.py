"""Any order of what happens to a scheduler in a fake world, for hypothesis."""

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled_world import World

from asyncrl.scheduler import events
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.config import SchedulerConfig

REPEATABLE = (
    events.GeneratorJoined
    | events.GeneratorLost
    | events.GeneratorLeaves
    | events.SamplesReleased
    | events.SampleFinished
    | events.SampleRewarded
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
        self.world = self.make_world(config, key)
        self.world.overwrites = True

    def make_world(self, config, key):
        return World(config, first_step=1, total_steps=5, group_key=key)

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
