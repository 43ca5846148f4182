"""A fake world around a scheduler with dynamic sampling: contents have rewards, steps have signal.

Each content of a sample (drawn, or changed by a verification) has a reward, which is told some time
after the content. The world decides itself which groups a step must have, from the rewards of what
was delivered or left out, and compares.
"""

import random

from scheduled_world import World

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import events
from asyncrl.scheduler.commands import RunOutcome


class DynamicWorld(World):
    """As `World`, with rewards.

    Args:
        config: of the scheduler, with dynamic sampling.
        with_signal: chance that two samples of a group differ, roughly.
        seed: of the rewards.
    """

    def __init__(self, config, *, with_signal=0.5, seed=0, **more):
        self._rng = random.Random(seed)
        self.with_signal = with_signal
        self.contents: dict[tuple[str, SampleId], tuple[int, float]] = {}
        """Number and reward of the present content."""
        self.reported: dict[tuple[str, SampleId], tuple[int, float]] = {}
        """The same of what was reported last."""
        self.pending: list[tuple[str, SampleId, tuple[int, float]]] = []
        """Rewards that are not told yet."""
        self.no_signal: dict[int, int] = {}
        """Groups that were left out, with the step."""
        self.got: dict[SampleId, float] = {}
        """Rewards of what the trainer has."""
        self.redrawn: set[int] = set()
        """Groups of which samples were lost during their delivery."""
        self.count = 0
        super().__init__(config, **more)
        self.max_groups = config.dynamic_sampling.max_batches * config.groups_per_step
        self.starts = {self.first_step: self.first_step * config.groups_per_step}

    # Contents and rewards

    def _draw(self, name, sample):
        """The sample has other tokens, and so another reward."""
        self.count += 1
        differs = self._rng.random() < self.with_signal
        self.contents[name, sample] = self.count, float(sample.sample % 2) if differs else 0.0

    def _note(self, name, sample):
        """What is reported now, whose reward is told later."""
        self.reported[name, sample] = content = self.contents[name, sample]
        self.pending.append((name, sample, content))

    def enabled(self):
        known = {
            ("reward", name, sample)
            for name, sample, content in self.pending
            if name in self.generators and self.reported.get((name, sample)) == content
        }
        return super().enabled() + sorted(known)

    def _reward(self, name, sample):
        content = self.reported[name, sample]
        self.pending.remove((name, sample, content))
        self.tell(events.SampleRewarded(name, sample, content[1]))

    def _finish(self, name, sample):
        self._draw(name, sample)
        self._note(name, sample)
        super()._finish(name, sample)

    def _verified(self, name, sample):
        if self._changes():
            self._draw(name, sample)
        self._note(name, sample)
        super()._verified(name, sample)

    def _changes(self):
        """Whether a verification has changed tokens."""
        return self._rng.random() < 0.5

    def _verification_begins(self, g, unchanged, verified):
        for sample in unchanged:
            self._note(g.name, sample)
        super()._verification_begins(g, unchanged, verified)

    def _arrive(self, name, sample):
        self.got.setdefault(sample, self.contents[name, sample][1])
        super()._arrive(name, sample)

    # The trainer

    def _consume(self, step):
        groups = self.declared.pop(step)
        bound = self.of_step(step).max_off_policy_steps
        for group in groups:
            assert group not in self.consumed, "a group was trained on twice"
            assert group not in self.failed, "a failed group was trained on"
            assert group not in self.no_signal, "a group was left out and trained on"
            self.consumed[group] = step
            ids = [SampleId(group, i) for i in range(self.config.group_size)]
            for sample in ids:
                staleness = step - self.received.pop(sample)
                assert 0 <= staleness <= bound
                self.staleness.append(staleness)
            rewards = {self.got.pop(sample) for sample in ids}
            assert len(rewards) > 1 or group in self.redrawn, "a group without signal"
        self.trained = step + 1
        return groups

    def lose(self, name, *, acks_lost):
        g = self.generators[name]
        self.redrawn |= {sample.group for sample in g.sending}
        self.redrawn |= {sample.group for n, sample in self.acks if n == name and acks_lost}
        super().lose(name, acks_lost=acks_lost)

    def lose_trainer(self, *, unsaid=False):
        super().lose_trainer(unsaid=unsaid)
        self.got.clear()

    def trainer_joins(self, version=None):
        if self.lineage >= 0:
            version = self.trained if version is None else version
            start = self.starts[version]
            self.starts = {step: at for step, at in self.starts.items() if step <= version}
            self.no_signal = {g: s for g, s in self.no_signal.items() if g < start}
            self.failed = {g: why for g, why in self.failed.items() if g < start}
            kept = dict(self.failed)
            super().trainer_joins(version)
            self.failed |= {g: why for g, why in kept.items() if g not in self.failed}
        else:
            super().trainer_joins(version)

    # Commands

    def _do_start_sample(self, c):
        g = self.generators[c.generator]
        assert self.finished is None
        assert self.verifies or c.priority == 0
        assert self.config.partial_rollout or g.install is None
        assert c.sample.group not in self.failed
        assert c.sample.group not in self.no_signal
        for other in self.generators.values():
            assert c.sample not in other.running
            assert c.sample not in other.held
        g.running[c.sample] = g.version if g.version >= 0 else None
        assert len(g.running) <= g.limit
        assert not g.paused
        self.placed[c.sample.group] = c.generator

    def _do_install_weights(self, c):
        g = self.generators[c.generator]
        assert g.install is None, "two installations outstanding"
        g.install, g.verify_at_install = c.policy_version, c.verify

    def _do_deliver_group(self, c):
        assert self.trainer
        start = self.starts[c.step]
        assert start <= c.group < start + self.max_groups
        least = max(0, c.step - self.of_step(c.step).max_off_policy_steps)
        for name, sample in c.samples:
            g = self.generators[name]
            assert g.held[sample] >= least, "judged on data of another policy"
            assert self.reported[name, sample] == self.contents[name, sample]
            g.sending.add(sample)

    def _do_report_group_without_signal(self, c):
        assert c.group not in self.no_signal
        assert c.group not in self.consumed
        start = self.starts[c.step]
        assert start <= c.group < start + self.max_groups
        least = max(0, c.step - self.of_step(c.step).max_off_policy_steps)
        ids = [SampleId(c.group, i) for i in range(self.config.group_size)]
        (g,) = [one for one in self.generators.values() if ids[0] in one.held]
        assert all(g.held[sample] >= least for sample in ids), "judged on data of another policy"
        assert {self.contents[g.name, sample][1] for sample in ids} == {c.reward}
        self.no_signal[c.group] = c.step

    def _do_declare_step(self, c):
        """The world's own account: the next groups in data order that carry signal."""
        assert c.step == max([self.trained - 1, *self.declared]) + 1, "steps are declared in order"
        start = group = self.starts[c.step]
        members = []
        while len(members) < self.config.groups_per_step and group < start + self.max_groups:
            if group not in self.failed and group not in self.no_signal:
                assert group in c.groups, "a group was passed over"
                members.append(group)
            group += 1
        assert c.groups == tuple(members)
        assert all(
            SampleId(one, i) in self.received
            for one in members
            for i in range(self.config.group_size)
        )
        self.starts[c.step + 1] = group
        self.declared[c.step] = c.groups

    # Orders

    def change(self, config):
        first = self.scheduler.state.first_free_step
        assert all(one.step < first for one in self.scheduler.state.groups.values())
        self.changes[first] = config
        self.tell(events.BoundsChanged({first: config}))

    def drain(self):
        self.tell(events.DrainRequested())

    # Assertions on the whole

    def check(self):
        view = super().check()
        assert view.groups_without_signal == len(self.no_signal)
        return view

    def check_result(self):
        if self.finished is RunOutcome.DONE:
            every = range(self.starts[self.first_step], self.starts[self.total_steps])
            settled = {*self.consumed, *self.failed, *self.no_signal}
            assert settled.issuperset(every), "a group was lost"
            assert self.trained == self.total_steps
        else:
            assert self.finished in (RunOutcome.STOPPED, RunOutcome.FAILED)
        for g in self.generators.values():
            assert not g.running
            assert not g.held
            assert not g.verifying
