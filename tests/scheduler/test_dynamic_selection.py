"""Which groups dynamic sampling trains on: exactly those of a synchronous trainer, in distribution.

The real scheduler runs ahead among fake generators whose policy is enumerated: an answer is one of
three tokens, of which one is right. An answer is drawn when it is started, verified by the rule of
docs/exactness.md when the scheduler says so, and both take longer if it is the slow wrong token.
Each version's policy is a function of the tokens that were trained on.

Given the policy of a step, a synchronous trainer would look at group after group, independent draws
of that policy. So over all groups that steps looked at, signal has the probability that the policy
says, and so has the slow token in those that were trained on. Both sums of differences are
martingales, whose z `false_alarms` judges; the seeds are fixed.
"""

import functools
import math
import random

import pytest
from dynamic_world import DynamicWorld
from false_alarms import SIGMAS, Claims
from scheduled_world import run_clocked

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import dynamic_sampling, state
from asyncrl.scheduler.commands import RunOutcome
from asyncrl.scheduler.config import DynamicSamplingConfig, SchedulerConfig
from asyncrl.scheduler.dynamic_ledger import DynamicLedger
from asyncrl.scheduler.dynamic_sampling import DynamicSampling
from asyncrl.scheduler.ledger import Outcome
from asyncrl.scheduler.records import HELD, Verdict, has_signal

WRONG, RIGHT, SLOW = range(3)
CLAIMS = Claims(__file__)
STEPS, RUNS = 8, 70


class Sum:
    """A sum of differences between what happened and its probability."""

    def __init__(self):
        self.difference = self.variance = 0.0
        self.count = 0

    def add(self, happened, probability):
        self.difference += happened - probability
        self.variance += probability * (1 - probability)
        self.count += 1

    @property
    def z(self):
        return self.difference / math.sqrt(self.variance)


@functools.cache
def policy_of(tilt, prompt):
    weights = [math.exp(x) for x in (0.3 + tilt, 0.8 * prompt - 0.2 * tilt, 0.2 - tilt)]
    return [weight / sum(weights) for weight in weights]


class PolicyWorld(DynamicWorld):
    """Answers of one token, of an enumerated policy; groups of two, with signal if one is right."""

    def __init__(self, config, *, seed, signal, slow):
        self.signal, self.slow = signal, slow
        self.texts: dict[tuple[str, SampleId], tuple[int, int]] = {}
        """Token, and the version of the policy that it follows."""
        self.trained_texts: dict[SampleId, int] = {}
        self.tilts = {0: 0.0}
        """Of the policy of each version."""
        super().__init__(config, total_steps=STEPS, seed=seed)

    def policy(self, version, group):
        """Probability of each token; it depends on the prompt, of which there are two."""
        return policy_of(self.tilts[version], group % 2)

    def _token(self, weights):
        return self._rng.choices(range(3), weights)[0]

    def happen(self, happening):
        super().happen(happening)
        for g in self.generators.values():
            for sample, version in [*g.running.items(), *g.verifying.items()]:
                self._follow(g.name, sample, version)

    def _follow(self, name, sample, version):
        """Have a text follow the policy of this version, by rejection sampling."""
        token, before = self.texts.get((name, sample), (None, None))
        if before == version:
            return
        p = self.policy(version, sample.group)
        if before is None:
            self.texts[name, sample] = self._token(p), version
            return
        q = self.policy(before, sample.group)
        if self._rng.random() >= p[token] / q[token]:
            token = self._token([max(0.0, x - y) for x, y in zip(p, q, strict=True)])
        self.texts[name, sample] = token, version

    def _do_start_sample(self, c):
        super()._do_start_sample(c)
        self.texts.pop((c.generator, c.sample), None)
        self._follow(c.generator, c.sample, self.generators[c.generator].version)

    def _changes(self):
        return True

    def _draw(self, name, sample):
        self.count += 1
        self.contents[name, sample] = self.count, float(self.texts[name, sample][0] == RIGHT)

    def _do_discard_samples(self, c):
        super()._do_discard_samples(c)
        for sample in c.samples:
            self.texts.pop((c.generator, sample), None)

    def _do_report_group_without_signal(self, c):
        self.no_signal[c.group] = c.step

    def _do_deliver_group(self, c):
        for name, sample in c.samples:
            self.generators[name].sending.add(sample)

    def _do_declare_step(self, c):
        self.declared[c.step] = c.groups

    def _looked_at(self, group, step, *, has_signal):
        right = self.policy(step, group)[RIGHT]
        self.signal.add(has_signal, 2 * right * (1 - right))

    def _arrive(self, name, sample):
        self.trained_texts[sample] = self.texts[name, sample][0]
        super()._arrive(name, sample)

    def _consume(self, step):
        groups, slow = self.declared.pop(step), 0
        for group in [one for one in self.no_signal if one < max(groups)]:
            del self.no_signal[group]
            self._looked_at(group, step, has_signal=False)
        for group in groups:
            tokens = [self.trained_texts[SampleId(group, i)] for i in range(2)]
            self._looked_at(group, step, has_signal=True)
            p = self.policy(step, group)
            self.slow.add(SLOW in tokens, p[SLOW] / (p[SLOW] + p[WRONG]))
            slow += SLOW in tokens
        self.trained = step + 1
        self.tilts[step + 1] = 0.7 if 2 * slow > len(groups) else -0.7
        return groups

    def check(self):
        """Other tests do."""

    def check_result(self):
        """Other tests do."""


def sums_of(mode, runs=RUNS, **settings):
    signal, slow = Sum(), Sum()
    sampling = DynamicSamplingConfig(enabled=True, max_batches=20)
    config = SchedulerConfig(
        on_update=mode, group_size=2, groups_per_step=2, dynamic_sampling=sampling, **settings
    )
    for seed in range(runs):
        world = PolicyWorld(config, seed=seed, signal=signal, slow=slow)
        for slots in (2, 6):
            world.join(slots)
        world.trainer_joins()

        def takes(happening, world=world):
            kind, name, sample = happening
            token = world.texts.get((name, sample), (WRONG, 0))[0]
            return {"finish": 5.0, "verified": 500.0}.get(kind, 1.0) if token == SLOW else 1.0

        run_clocked(world, random.Random(seed), slow=takes)
        assert world.finished is RunOutcome.DONE
    return signal, slow


@pytest.mark.parametrize("mode", ["verify", "keep"])
def test_the_groups_trained_on_follow_the_policy_that_trains_on_them(mode):
    signal, slow = sums_of(mode)
    assert slow.count == RUNS * STEPS * 2
    assert signal.count > 1.5 * slow.count
    assert abs(signal.z) < CLAIMS.sigmas()
    assert abs(slow.z) < CLAIMS.sigmas()


class FirstToFinish(DynamicLedger):
    """A step takes the first groups with signal that arrive, and forgets the others before them."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.taken: dict[int, tuple[int, ...]] = {}

    def membership(self, step):
        if step not in self._starts or step in self.taken:
            return self.taken.get(step)
        arrived = [g for g, one in self._settled.items() if one is Outcome.ARRIVED]
        left = [g for g in arrived if not any(g in groups for groups in self.taken.values())]
        if len(left) < self._per_step:
            return None
        self.taken[step] = members = tuple(sorted(left[: self._per_step]))
        self._starts[step + 1] = max([*members, self._starts[step] - 1]) + 1
        return members

    def looked_at(self, step):
        return self._per_step, self._per_step

    def consume(self, step, groups):
        self._trained_in[step] = len(groups)
        self.next_step = step + 1


def judged(self):
    """All groups that are judged, wherever they are."""
    groups = [g for g in self._state.groups.values() if g.index >= self._ledger.first_group]
    return [group for group in groups if self._verdict(group) is not Verdict.OPEN]


def test_taking_what_finishes_first_is_detected(monkeypatch):
    monkeypatch.setattr(state, "DynamicLedger", FirstToFinish)
    monkeypatch.setattr(dynamic_sampling, "DynamicLedger", FirstToFinish)
    monkeypatch.setattr(DynamicSampling, "_reached", judged)
    _, slow = sums_of("verify", 120)
    assert slow.z < -4.5  # p < 7e-6; below ALARM with twice as many runs


def test_leaving_groups_out_by_the_verdict_of_another_policy_is_detected(monkeypatch):
    reached = DynamicSampling._reached

    def too_early(self):
        """Leaves out every group whose rewards are equal, also those of steps to come."""
        groups = reached(self)
        for group in self._state.groups.values():
            is_complete = None not in group.signal.rewards and set(group.states) == {HELD}
            is_complete &= group not in groups and group.index < self._ledger.next_group
            if is_complete and not has_signal(group.signal.rewards):
                group.signal.verdict = Verdict.NO_SIGNAL
                groups.append(group)
        return groups

    monkeypatch.setattr(DynamicSampling, "_reached", too_early)
    signal, _ = sums_of("verify", 80)
    assert signal.z < -SIGMAS
