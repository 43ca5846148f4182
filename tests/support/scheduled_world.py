"""A scheduler among fake generators and a fake trainer, in the order of a test's choice."""

import re

from scheduled_generator import FakeGenerator
from scheduled_orders import Orders

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.commands import ReleaseSamples, RewindGenerator, RunOutcome, VerifySamples
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.scheduler.scheduler import Scheduler


class World(Orders):
    """Fake generators and a fake trainer that carry out commands and assert that each is allowed.

    A test chooses what happens next from `enabled`, so it decides the order of all events.
    """

    def __init__(self, config, *, first_step=0, total_steps=4, group_key=None, sessions=0):
        self.config, self.sessions = config, sessions
        self.first_step, self.total_steps = first_step, total_steps
        self.scheduler = Scheduler(
            config,
            first_step=first_step,
            total_steps=total_steps,
            group_key=group_key,
            sessions=sessions,
        )
        self.generators: dict[str, FakeGenerator] = {}
        self.lost: list[str] = []
        self.received: dict[SampleId, int] = {}
        self.acks: list[tuple[str, SampleId]] = []
        self.declared: dict[int, tuple[int, ...]] = {}
        self.consumed: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.trained = first_step
        self.published = first_step
        self.lineage, self.trainer = -1, False
        self.rewinds = 0
        self.unsaid = False
        self.publishing = False
        self.overwrites = False
        self.finished: RunOutcome | None = None
        self.history: list[events.Event] = []
        self.placed: dict[int, str] = {}
        self.joined = 0
        self.staleness: list[int] = []
        self.verified = 0
        Orders.__init__(self)
        self.leavers: set[str] = set()
        self.moved = 0

    # What can happen next

    def enabled(self):
        """What can happen next: (kind, generator, sample or version), without repetition."""
        happenings = []
        for g in self.generators.values():
            happenings += g.enabled(self.trained, self.overwrites, self.trainer)
        happenings += [("ack", name, sample) for name, sample in self.acks]
        if self.publishing:
            happenings.append(("publish", "", self.trained))
        elif self.trainer and self.trained in self.declared:
            happenings.append(("train", "", self.trained))
        return happenings

    def happen(self, happening):
        """Let one of `enabled` happen."""
        kind, name, what = happening
        getattr(self, "_" + kind)(name, what)

    def _finish(self, name, sample):
        g = self.generators[name]
        oldest = g.running.pop(sample)
        g.held[sample], g.newest[sample] = oldest, g.version
        self.tell(events.SampleFinished(name, sample, 10, oldest))

    def _verified(self, name, sample):
        g = self.generators[name]
        g.held[sample], g.newest[sample] = g.verifying.pop(sample), g.version
        self.tell(events.SampleFinished(name, sample, 10, g.held[sample]))

    def _read(self, name, _):
        g = self.generators[name]
        command = g.unread.pop(0)
        if isinstance(command, VerifySamples):
            self._verification_begins(g, *g.verify(command))
            return
        if isinstance(command, ReleaseSamples):
            self.moved += len(command.samples)
            g.discard(command.samples)
            self.tell(events.SamplesReleased(name))
            return
        g.rewind(command.policy_version)
        # Acknowledgements of the lost trainer that have not arrived are ignored there.
        self.acks = [(n, s) for n, s in self.acks if n != name]
        self.history = [e for e in self.history if getattr(e, "generator", "") != name]
        self.tell(events.GeneratorRewound(name, command.lineage, g.version))

    def _verification_begins(self, g, unchanged, verified):
        self.verified += verified
        for sample in unchanged:
            self.tell(events.SampleFinished(g.name, sample, 10, g.held[sample]))

    def _arrive(self, name, sample):
        g = self.generators[name]
        g.sending.discard(sample)
        oldest = g.held.pop(sample)
        self.received.setdefault(sample, oldest)  # the trainer de-duplicates by id
        self.acks.append((name, sample))

    def _ack(self, name, sample):
        self.acks.remove((name, sample))
        self.tell(events.SampleDelivered(name, sample))

    def _install(self, name, version):
        g = self.generators[name]
        self._verification_begins(g, *g.installed(version))

    def _report(self, name, version):
        """The weights have been compared with the trainer's, after what is drawn meanwhile."""
        g = self.generators[name]
        g.install, g.reported = None, version
        self.tell(events.WeightsInstalled(name, version))

    def _miss(self, name, version):
        """The weights were overwritten by newer ones while they were read."""
        g = self.generators[name]
        g.install, g.verify_at_install = None, ()
        self.tell(events.WeightsInstalled(name, g.version))

    def _train(self, _, step):
        groups = self._consume(step)
        self.publishing = True
        self.tell(events.StepFinished(step, groups))

    def _consume(self, step):
        groups = self.declared.pop(step)
        size, bound = self.config.group_size, self.of_step(step).max_off_policy_steps
        for group in groups:
            assert group // self.config.groups_per_step == step
            assert group not in self.consumed, "a group was trained on twice"
            assert group not in self.failed, "a failed group was trained on"
            self.consumed[group] = step
            for i in range(size):
                staleness = step - self.received.pop(SampleId(group, i))
                assert 0 <= staleness <= bound
                self.staleness.append(staleness)
        self.trained = step + 1
        return groups

    def _publish(self, _, version):
        self.publishing, self.published = False, version
        self.tell(events.WeightsPublished(version))

    # What a test may do besides

    def trainer_joins(self, version=None):
        """A trainer joins; one that replaces a lost one continues from this older version."""
        if self.lineage >= 0:
            version = self.trained if version is None else version
            per_step = self.config.groups_per_step
            self.trained = self.published = version
            self.consumed = {g: step for g, step in self.consumed.items() if step < version}
            self.failed = {g: why for g, why in self.failed.items() if g // per_step < version}
            goes_on = version < self.total_steps and not self.scheduler.state.stopping
            if self.finished is RunOutcome.DONE and goes_on:
                self.finished = None
            self.rewinds += 1
        self.unsaid = False
        self.trainer = True
        self.lineage += 1
        trainers = (events.StepFinished, events.WeightsPublished)
        self.history = [e for e in self.history if not isinstance(e, trainers)]
        self.tell(events.TrainerJoined(self.trained, self.lineage))

    def lose_trainer(self, *, unsaid=False):
        """The trainer is killed; `unsaid`: after a step that it did not report any more."""
        if unsaid and not self.publishing and self.trained in self.declared:
            self._consume(self.trained)
            self.unsaid = True
        self.trainer = self.publishing = False
        self.declared.clear()
        self.received.clear()
        self.tell(events.TrainerLost())

    def join(self, slots, version=None):
        """A generator joins; returns its name."""
        name = f"g{self.joined}"
        self.joined += 1
        version = self.published if version is None else version
        limit = self.config.in_flight_limit(slots)
        self.generators[name] = FakeGenerator(name, slots, version, limit, reported=version)
        self.tell(events.GeneratorJoined(name, slots, version))
        return name

    def lose(self, name, *, acks_lost):
        """A generator is killed; `acks_lost`: with the acknowledgements on their way to it."""
        del self.generators[name]
        self.lost.append(name)
        if acks_lost:
            self.acks = [(n, s) for n, s in self.acks if n != name]
        self.tell(events.GeneratorLost(name))

    def leave(self, name):
        """The user orders that a generator leaves."""
        self.leavers.add(name)
        self.tell(events.GeneratorLeaves(name))

    def fail(self, name, sample):
        """A running sample fails."""
        del self.generators[name].running[sample]
        self.tell(events.SampleFailed(name, sample, "the reward function raised"))

    def fill(self, name, share):
        """A generator reports how full its KV space is."""
        self.generators[name].kv_used = share
        self.tell(events.KvUsed(name, share))

    def tell(self, event):
        """Tell the scheduler an event and carry out its commands."""
        self.history.append(event)
        for command in self.scheduler.on_event(event):
            self.carry_out(command)
        return event

    # Commands

    def carry_out(self, command):
        words = re.sub(r"(?<!^)([A-Z])", r"_\1", type(command).__name__).lower()
        getattr(self, "_do_" + words)(command)

    def _do_start_sample(self, c):
        g, step = self.generators[c.generator], c.sample.group // self.config.groups_per_step
        assert self.finished is None
        assert c.sample.group <= self.scheduler.state.admission.last_group(g.version, ahead=True)
        bound = self.of_step(step).max_off_policy_steps
        assert c.priority == max(0, step - bound - g.reported)
        mode = self.of_step(step).on_update
        if mode != "verify" or g.kv_used >= self.config.runahead_kv_limit:
            assert step - g.version <= bound
        assert self.trained <= step < self.total_steps
        assert self.begun is None or c.sample.group in self.begun
        assert self.config.partial_rollout or g.install is None
        assert c.sample.group not in self.failed
        for other in self.generators.values():
            assert c.sample not in other.running
            assert c.sample not in other.held
        assert not any(isinstance(command, RewindGenerator) for command in g.unread)
        if c.generator in self.leavers:
            assert not self.verifies
            assert self.placed[c.sample.group] == c.generator, "it begins no group"
        g.running[c.sample] = g.version if g.version >= 0 else None
        assert len(g.running) <= g.limit + g.told_away
        assert len(g.running) <= max(g.limit, self.sessions)
        assert not g.paused
        self.placed[c.sample.group] = c.generator

    def _do_verify_samples(self, c):
        g = self.generators[c.generator]
        assert c.samples
        assert c.min_version <= g.reported
        assert self.config.partial_rollout or g.install is None
        g.unread.append(c)

    def _do_install_weights(self, c):
        g = self.generators[c.generator]
        assert g.install is None, "two installations outstanding"
        assert c.policy_version == self.published > g.reported
        assert self.config.partial_rollout or g.version < 0 or not (g.running or g.verifying)
        g.install, g.verify_at_install = c.policy_version, c.verify
        for due in c.verify:
            assert due.samples
            assert due.generator == c.generator
            assert g.reported < due.min_version <= c.policy_version
        groups = [due.samples[0].group for due in c.verify]
        assert groups == sorted(set(groups)), "verified in data order"

    def _do_rewind_generator(self, c):
        assert c.lineage == self.lineage
        assert c.policy_version == self.published
        self.generators[c.generator].unread.append(c)

    def _do_release_samples(self, c):
        assert c.generator in self.leavers
        assert self.verifies
        g = self.generators[c.generator]
        assert c.samples
        assert not g.sending.intersection(c.samples)
        assert not any(isinstance(command, ReleaseSamples) for command in g.unread)
        g.unread.append(c)

    def _do_end_generator(self, c):
        assert c.generator in self.leavers
        g = self.generators.pop(c.generator)
        assert not g.running
        assert not g.held
        assert not g.verifying
        self.lost.append(c.generator)

    def _do_deliver_group(self, c):
        assert self.trainer
        assert c.step == c.group // self.config.groups_per_step
        assert c.samples
        for name, sample in c.samples:
            assert sample.group == c.group
            assert sample in self.generators[name].held
            self.generators[name].sending.add(sample)

    def _do_declare_step(self, c):
        assert c.step == max([self.trained - 1, *self.declared]) + 1, "steps are declared in order"
        own = range(
            c.step * self.config.groups_per_step, (c.step + 1) * self.config.groups_per_step
        )
        assert c.groups == tuple(g for g in own if g not in self.failed)
        for group in c.groups:
            for i in range(self.config.group_size):
                assert SampleId(group, i) in self.received
        self.declared[c.step] = c.groups

    def _do_discard_samples(self, c):
        self.generators[c.generator].discard(c.samples)

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
        self.finished = c.outcome

    # Assertions on the whole

    def check(self):
        """Compare the scheduler's state with this world's; the scheduler's view."""
        self.scheduler.check()
        view = self.scheduler.snapshot()
        state = self.scheduler.state
        assert (state.finished and state.finished.outcome) == self.finished
        assert bool(view.waits) == (self.finished is None)
        if not self.unsaid:
            assert state.step == self.trained
            assert view.groups_consumed == len(self.consumed)
        assert view.groups_failed == len(self.failed)
        running = sum(len(g.running) for g in self.generators.values())
        # Both sides forget a failed or lost sample at the same time.
        assert view.samples_running == running
        return view

    def check_result(self):
        """After the end: every group was consumed or failed, and nothing is left."""
        per_step = self.config.groups_per_step
        if self.finished is RunOutcome.DONE:
            every = range(self.first_step * per_step, self.total_steps * per_step)
            assert sorted([*self.consumed, *self.failed]) == list(every)
            assert self.trained == self.total_steps
        else:
            assert self.finished in (RunOutcome.STOPPED, RunOutcome.FAILED)
        for g in self.generators.values():
            assert not g.running
            assert not g.held
            assert not g.verifying


def run_clocked(world, rng, *, slow=None, on_time=None):
    """Run to the end; each happening takes a random time once enabled. Returns the end time."""
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
        for gone in due.keys() - enabled:
            del due[gone]
        world.happen(happening)
        world.check()
        if on_time:
            on_time(world, now)
    world.check_result()
    return now


def make_world(steps=4, **settings_):
    """A world with `keep`, k = 1, and small groups and steps unless the settings say otherwise."""
    keep = {"on_update": "keep", "max_off_policy_steps": 1}
    config = SchedulerConfig(**{"group_size": 4, "groups_per_step": 6, **keep, **settings_})
    return World(config, total_steps=steps)
