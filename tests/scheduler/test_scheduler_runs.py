"""Whole runs of the scheduler against a fake world that holds it to what it promises.

`World` carries out commands, knows what could happen next, and asserts on every command. It is
driven in two ways: by a clock (random durations, runs to the end) and by hypothesis (any order of
completions, losses, joins, duplicates and failures).
"""

import random
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.trajectory import SampleId
from scheduler import events as ev
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler


@dataclass
class FakeGenerator:
    name: str
    slots: int
    version: int
    limit: int
    running: dict[SampleId, int] = field(default_factory=dict)
    """Oldest version of each sample, in the order of arrival."""
    held: dict[SampleId, int] = field(default_factory=dict)
    sending: set[SampleId] = field(default_factory=set)
    verifying: dict[SampleId, int] = field(default_factory=dict)
    mail: list[tuple[tuple[SampleId, ...], int]] = field(default_factory=list)
    """Commands to verify that it has not read yet."""
    install: int | None = None
    paused: bool = False


class World:
    """Generators and a trainer that do as told, each happening at a time of the driver's choice."""

    def __init__(self, config, *, first_step=0, total_steps=4, group_key=None):
        self.config = config
        self.first_step, self.total_steps = first_step, total_steps
        self.scheduler = Scheduler(
            config, first_step=first_step, total_steps=total_steps, group_key=group_key
        )
        self.generators: dict[str, FakeGenerator] = {}
        self.lost: list[str] = []
        self.received: dict[SampleId, int] = {}
        self.acks: list[tuple[str, SampleId]] = []
        self.plans: dict[int, tuple[int, ...]] = {}
        self.consumed: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.trained = first_step
        self.published = first_step
        self.publishing = False
        self.overwrites = False
        self.finished: str | None = None
        self.history: list[ev.Event] = []
        self.placed: dict[int, str] = {}
        self.joined = 0
        self.staleness: list[int] = []
        self.verified = 0

    # -- what can happen next: (kind, generator, sample), each at most once at a time

    def enabled(self):
        happenings = []
        for g in self.generators.values():
            if not g.paused:
                happenings += [("finish", g.name, s) for s in list(g.running)[: g.slots]]
                happenings += [("verified", g.name, s) for s in list(g.verifying)[: g.slots]]
            if g.mail:
                happenings.append(("read", g.name, g.mail[0][1]))
            happenings += [("arrive", g.name, s) for s in sorted(g.sending)]
            if g.install is not None:
                happenings.append(("install", g.name, g.install))
                if self.overwrites and g.install < self.trained:
                    happenings.append(("miss", g.name, g.install))
        happenings += [("ack", name, sample) for name, sample in self.acks]
        if self.publishing:
            happenings.append(("publish", "", self.trained))
        elif self.trained in self.plans:
            happenings.append(("train", "", self.trained))
        return happenings

    def happen(self, happening):
        kind, name, what = happening
        getattr(self, "_" + kind)(name, what)

    def _finish(self, name, sample):
        g = self.generators[name]
        oldest = g.running.pop(sample)
        g.held[sample] = oldest
        self.tell(ev.SampleFinished(name, sample, 10, oldest, 1.0))

    def _verified(self, name, sample):
        g = self.generators[name]
        g.held[sample] = g.verifying.pop(sample)
        self.tell(ev.SampleFinished(name, sample, 10, g.held[sample], 1.0))

    def _read(self, name, _):
        """Verify what is too old; what is not there any more, or is not too old, is left alone."""
        g = self.generators[name]
        samples, least = g.mail.pop(0)
        assert g.version >= least
        for sample in samples:
            if g.running.get(sample, least) < least:
                g.running[sample] = g.version
            elif g.held.get(sample, least) < least:
                assert sample not in g.sending
                del g.held[sample]
                g.verifying[sample] = g.version
                self.verified += 1

    def _arrive(self, name, sample):
        g = self.generators[name]
        g.sending.discard(sample)
        oldest = g.held.pop(sample)
        self.received.setdefault(sample, oldest)  # the trainer de-duplicates by id
        self.acks.append((name, sample))

    def _ack(self, name, sample):
        self.acks.remove((name, sample))
        self.tell(ev.SampleDelivered(name, sample))

    def _install(self, name, version):
        g = self.generators[name]
        g.version, g.install = version, None
        self.tell(ev.WeightsInstalled(name, version))

    def _miss(self, name, version):
        """The weights were overwritten by newer ones while they were read."""
        g = self.generators[name]
        g.install = None
        self.tell(ev.WeightsInstalled(name, g.version))

    def _train(self, _, step):
        groups = self.plans.pop(step)
        size, bound = self.config.group_size, self.config.max_off_policy_steps
        for group in groups:
            assert group // self.config.groups_per_step == step
            assert group not in self.consumed, "a group was trained on twice"
            assert group not in self.failed, "a failed group was trained on"
            self.consumed[group] = step
            for i in range(size):
                staleness = step - self.received.pop(SampleId(group, i))
                assert 0 <= staleness <= bound
                self.staleness.append(staleness)
        self.trained, self.publishing = step + 1, True
        self.tell(ev.StepFinished(step, groups))

    def _publish(self, _, version):
        self.publishing, self.published = False, version
        self.tell(ev.WeightsPublished(version))

    # -- what the driver may do to it

    def join(self, slots, version=None):
        name = f"g{self.joined}"
        self.joined += 1
        version = self.published if version is None else version
        limit = self.config.in_flight_limit(slots)
        self.generators[name] = FakeGenerator(name, slots, version, limit)
        self.tell(ev.GeneratorJoined(name, slots, version))
        return name

    def lose(self, name, *, acks_lost):
        del self.generators[name]
        self.lost.append(name)
        if acks_lost:
            self.acks = [(n, s) for n, s in self.acks if n != name]
        self.tell(ev.GeneratorLost(name))

    def fail(self, name, sample):
        del self.generators[name].running[sample]
        self.tell(ev.SampleFailed(name, sample, "the reward function raised"))

    def tell(self, event):
        self.history.append(event)
        for command in self.scheduler.on_event(event):
            self.carry_out(command)
        return event

    # -- commands

    def carry_out(self, command):
        words = re.sub(r"(?<!^)([A-Z])", r"_\1", type(command).__name__).lower()
        getattr(self, "_do_" + words)(command)

    def _do_start_sample(self, c):
        g, step = self.generators[c.generator], c.sample.group // self.config.groups_per_step
        assert self.finished is None
        assert c.sample.group <= self.scheduler.policy.newest_group(g.version)
        assert c.priority == max(0, step - self.config.max_off_policy_steps - g.version)
        if self.config.on_update == "keep":
            assert step - g.version <= self.config.max_off_policy_steps
        assert self.trained <= step < self.total_steps
        assert c.sample.group not in self.failed
        for other in self.generators.values():
            assert c.sample not in other.running
            assert c.sample not in other.held
        g.running[c.sample] = g.version
        assert len(g.running) <= g.limit
        assert not g.paused
        self.placed[c.sample.group] = c.generator

    def _do_verify_samples(self, c):
        g = self.generators[c.generator]
        assert c.samples
        assert c.least_version <= g.version
        g.mail.append((c.samples, c.least_version))

    def _do_install_weights(self, c):
        g = self.generators[c.generator]
        assert g.install is None, "two installations outstanding"
        assert c.policy_version == self.published > g.version
        g.install = c.policy_version

    def _do_deliver_group(self, c):
        assert c.step == c.group // self.config.groups_per_step
        assert c.samples
        for name, sample in c.samples:
            assert sample.group == c.group
            assert sample in self.generators[name].held
            self.generators[name].sending.add(sample)

    def _do_declare_step(self, c):
        assert c.step == max([self.trained - 1, *self.plans]) + 1, "steps are declared in order"
        own = range(
            c.step * self.config.groups_per_step, (c.step + 1) * self.config.groups_per_step
        )
        assert c.groups == tuple(g for g in own if g not in self.failed)
        for group in c.groups:
            for i in range(self.config.group_size):
                assert SampleId(group, i) in self.received
        self.plans[c.step] = c.groups

    def _do_discard_samples(self, c):
        g = self.generators[c.generator]
        for sample in c.samples:
            g.running.pop(sample, None)
            g.held.pop(sample, None)
            g.verifying.pop(sample, None)
            g.sending.discard(sample)

    def _do_report_group_failed(self, c):
        assert c.group not in self.failed
        assert c.group not in self.consumed
        self.failed[c.group] = c.reason

    def _do_pause_generator(self, c):
        self.generators[c.generator].paused = True

    def _do_resume_generator(self, c):
        self.generators[c.generator].paused = False

    def _do_finish_run(self, c):
        assert self.finished is None
        self.finished = c.reason

    # -- judgements

    def check(self):
        self.scheduler.check()
        view = self.scheduler.snapshot()
        assert view.finished == self.finished
        assert bool(view.waits) == (self.finished is None)
        assert view.step == self.trained
        assert view.groups_consumed == len(self.consumed)
        assert view.groups_failed == len(self.failed)
        running = sum(len(g.running) for g in self.generators.values())
        # What failed at a generator or was lost is forgotten by both sides at once.
        assert view.samples_running == running

    def check_result(self):
        per_step = self.config.groups_per_step
        if self.finished == "done":
            every = range(self.first_step * per_step, self.total_steps * per_step)
            assert sorted([*self.consumed, *self.failed]) == list(every)
            assert self.trained == self.total_steps
        else:
            assert self.finished.split(":")[0] in ("stopped", "failed")
        for g in self.generators.values():
            assert not g.running
            assert not g.held
            assert not g.verifying


def run_clocked(world, rng, *, slow=None, on_time=None):
    """Give each happening a random duration from when it becomes possible; return the end time."""
    due, now = {}, 0.0
    while world.finished is None:
        enabled = world.enabled()
        assert enabled, f"deadlock: {world.scheduler.snapshot().waits}"
        for h in enabled:
            if h not in due:
                mean = {"finish": 1.0, "train": 4.0}.get(h[0], 0.01)
                factor = slow(h) if slow else 1.0
                due[h] = now + mean * factor * rng.lognormvariate(0.0, 0.8)
        happening = min(enabled, key=lambda h: due[h])
        now = due.pop(happening)
        due = {h: t for h, t in due.items() if h in set(enabled)}
        world.happen(happening)
        world.check()
        if on_time:
            on_time(world, now)
    world.check_result()
    return now


def make_world(steps=4, **settings_):
    config = SchedulerConfig(**{"group_size": 4, "groups_per_step": 6, **settings_})
    return World(config, total_steps=steps)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_runs_to_the_end_in_order(bound, seed):
    world = make_world(max_off_policy_steps=bound)
    for slots in (3, 8, 1):
        world.join(slots)
    world.tell(ev.TrainerJoined(0))
    run_clocked(world, random.Random(seed))
    assert world.finished == "done"
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
    world.tell(ev.TrainerJoined(0))
    most = 0

    def look(world, _):
        nonlocal most
        most = max(most, max(world.placed, default=0) // 6 - world.trained)

    run_clocked(world, random.Random(1), on_time=look)
    assert world.finished == "done"
    assert not world.failed
    assert set(world.staleness) == set(range(bound + 1))
    assert world.verified > 0
    assert most == bound + -(-ahead // 6), "it never ran ahead as far as it may"


def test_verify_without_staleness_is_faster_than_synchronous():
    times = {}
    for mode in ("keep", "verify"):
        world = make_world(max_off_policy_steps=0, on_update=mode, steps=8)
        for slots in (8, 8):
            world.join(slots)
        world.tell(ev.TrainerJoined(0))
        times[mode] = run_clocked(world, random.Random(3))
        assert set(world.staleness) == {0}
    assert times["verify"] < 0.85 * times["keep"]  # simulated time


def test_asynchronous_is_faster_than_synchronous_and_really_runs_ahead():
    times = {}
    for bound in (0, 1):
        world = make_world(max_off_policy_steps=bound, steps=8)
        for _ in range(2):
            world.join(4)
        world.tell(ev.TrainerJoined(0))
        times[bound] = run_clocked(world, random.Random(5))
    assert max(world.staleness) == 1
    assert times[1] < 0.8 * times[0]


def test_a_generator_that_installs_slowly_skips_versions_and_delays_nobody_for_ever():
    world = make_world(max_off_policy_steps=2, steps=10)
    world.join(4)
    world.join(4)
    world.tell(ev.TrainerJoined(0))

    def slow(h):
        return 3000.0 if h[:2] == ("install", "g1") else 1.0

    run_clocked(world, random.Random(1), slow=slow)
    installed = [e.policy_version for e in world.history if isinstance(e, ev.WeightsInstalled)
                 and e.generator == "g1"]  # fmt: skip
    assert world.finished == "done"
    assert len(installed) < 9
    assert installed == sorted(installed)


def test_a_straggler_blocks_only_its_own_slot():
    world = make_world(max_off_policy_steps=0, steps=1, groups_per_step=8, group_size=2)
    world.join(2)
    world.tell(ev.TrainerJoined(0))
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
        world.tell(ev.TrainerJoined(0))
        rng = random.Random(seed)
        losses = [5.0, 12.0, 13.0]

        def disturb(w, now, losses=losses, rng=rng):
            if losses and now > losses[0] and w.finished is None:
                losses.pop(0)
                w.lose(rng.choice(sorted(w.generators)), acks_lost=rng.random() < 0.5)
                w.join(4, version=0)
                w.check()

        run_clocked(world, rng, on_time=disturb)
        assert world.finished == "done"
        assert not world.failed


def test_a_prompt_goes_back_to_its_generator_in_the_next_epoch():
    config = SchedulerConfig(group_size=2, groups_per_step=8, max_off_policy_steps=0)
    world = World(config, total_steps=6, group_key=lambda group: group % 8)
    world.join(8)
    world.join(8)
    world.tell(ev.TrainerJoined(0))
    run_clocked(world, random.Random(0))
    same = [world.placed[g] == world.placed[g - 8] for g in range(8, 48)]
    assert sum(same) >= 0.8 * len(same)
    assert {world.placed[g] for g in range(8)} == {"g0", "g1"}


def test_a_resumed_run_begins_at_its_step():
    config = SchedulerConfig(group_size=2, groups_per_step=3)
    world = World(config, first_step=3, total_steps=5)
    world.join(4, version=-1)
    world.tell(ev.TrainerJoined(3))
    assert world.generators["g0"].install == 3
    run_clocked(world, random.Random(0))
    assert sorted(world.consumed) == list(range(9, 15))


class AnyOrder(RuleBasedStateMachine):
    """Any order of happenings, losses, joins, failures, duplicates, pauses and stops."""

    @initialize(
        bound=st.integers(0, 2),
        size=st.integers(1, 3),
        per_step=st.integers(1, 3),
        attempts=st.integers(1, 3),
        limit=st.sampled_from([None, None, 1, 3]),
        epochs=st.booleans(),
        ahead=st.sampled_from([None, 1, 2, 5]),
    )
    def begin(self, bound, size, per_step, attempts, limit, epochs, ahead):
        config = SchedulerConfig(
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
        self.trainer = False

    @precondition(lambda self: not self.trainer)
    @rule()
    def trainer_joins(self):
        self.trainer = True
        self.world.tell(ev.TrainerJoined(1))

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
    def an_event_comes_again(self, data):
        """Repeated news yields no new command, whenever it comes."""
        again = [
            e for e in self.world.history[-30:]
            if not isinstance(e, ev.TrainerJoined | ev.PauseRequested
                              | ev.ResumeRequested | ev.StopRequested | ev.WeightsInstalled)
        ]  # fmt: skip
        if again:
            event = data.draw(st.sampled_from(again))
            assert self.world.scheduler.on_event(event) == []

    @rule(pause=st.booleans())
    def pause_or_resume(self, pause):
        self.world.tell(ev.PauseRequested() if pause else ev.ResumeRequested())

    @precondition(lambda self: self.trainer)
    @rule(odds=st.integers(0, 9))
    def user_stops(self, odds):
        if odds == 0:
            self.world.tell(ev.StopRequested())

    @invariant()
    def books_are_right(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """Whatever happened before, the run comes to its end when the world is kind."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if not self.trainer:
            world.tell(ev.TrainerJoined(1))
        world.tell(ev.ResumeRequested())
        if not world.generators and world.finished is None:
            world.join(2)
        rng = random.Random(0)
        for _ in range(3000):
            if world.finished is not None:
                break
            enabled = world.enabled()
            assert enabled, f"deadlock: {world.scheduler.snapshot().waits}"
            world.happen(rng.choice(enabled))
        assert world.finished is not None, "starvation"
        world.check()
        world.check_result()


AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = AnyOrder.TestCase
