"""The staleness rule: which groups may start, and how old a token may be.

Step b trains policy version b into version b + 1. Groups have a fixed order; group g belongs to
step g // groups_per_step. A group may be *started* on a generator with version v installed if its
step is at most

    synchronous       v        generate only what is trained next
    keep, recompute   v + k    run up to k steps ahead; tokens are at most k versions old when used
    verify            v + k, plus max_runahead_groups groups, which are verified before use

k is `max_off_policy_steps`; `keep` with k = 0 is synchronous training. `recompute` differs from
`keep` only inside the generator, which rebuilds the KV of running samples. Everything else
(placement, refill, delivery, membership of steps) is the same code.

                synchronous                            keep (k > 0) and verify
generators      ▓▓▓▓▓▓▓▓░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
trainer         ░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░░░▓▓▓▓▓▓         ░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓

loop            | synchronous (k = 0)      | keep (k > 0)             | verify (k >= 0)
----------------+--------------------------+--------------------------+--------------------------
generate
  consumes      | groups of step b         | groups of steps b..b+k   | the same, plus run-ahead
  produces      | finished samples, held   | the same                 | the same
  waits for     | version b installed      | for step b': version     | the same; run-ahead groups
                |                          | b' - k installed         | start earlier
  unblocked by  | WeightsInstalled(b)      | WeightsInstalled(b' - k) | the same
  bounded by    | groups_per_step groups;  | (k+1) * groups_per_step; | + max_runahead_groups;
                | in-flight limit of each  | the same limit           | the same limit
                | generator                |                          |
verify
  consumes      |                          |                          | running and held samples
                |                          |                          | with tokens below b - k
  produces      |                          |                          | samples of versions >= b-k
  waits for     |                          |                          | version b - k installed
  unblocked by  |                          |                          | WeightsInstalled(b - k)
  bounded by    |                          |                          | once per sample and
                |                          |                          | generator
deliver
  consumes      | a finished group         | the same                 | a finished group without
                |                          |                          | tokens that are too old
  produces      | trajectories in the trainer, for later steps too
  waits for     | the trainer's acknowledgements
  unblocked by  | SampleDelivered
  bounded by    | the groups in flight
train
  consumes      | all groups of step b: membership is fixed by index, so no step favours short
                | answers
  produces      | version b + 1
  waits for     | each group of the step to be delivered or to fail
  unblocked by  | DeclareStep(b)
  bounded by    | one step at a time
install
  consumes      | version b + 1 (the latest published)
  produces      | a generator on the new version, in the middle of samples
  waits for     | that generator's previous install, so slow generators skip versions; with
                | `partial_rollout: false` also for its running samples
  unblocked by  | WeightsInstalled
  bounded by    | one install per generator

Why the bound holds. `keep`: a sample of step b is started on a generator whose version is at least
b - k, and a generator's version never decreases, so each of its tokens is drawn under a version of
at least b - k. `verify`: a sample with an older token is not delivered. A generator whose version
is at least b - k verifies it first, and the result has only tokens of that version or later. Step b
is trained from version b, so the staleness of each token is at most k. No sample is dropped for
being stale, so long answers do not starve.

Bounds may change while a run trains, at the first step of which no group was ever issued: each step
has its own bounds, and everything above holds with those of the step. A group may start when it and
all groups before it may. `keep` is then `verify` without run-ahead: nothing is ever too old.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from asyncrl.scheduler.config import SchedulerConfig


class Bounds(NamedTuple):
    """Limits of some steps: how far ahead groups may start, and how old their tokens may be."""

    first_step: int
    """First of these steps; they end before those of the next `Bounds`."""
    max_off_policy_steps: int
    """k: the largest staleness that a token may have when it is trained on."""
    verifies: bool
    """True if tokens that are too old are verified. If not, they must never be generated."""
    max_runahead_groups: int
    """Groups that may be started beyond those that need no verification; 0 unless `verifies`, or
    below 0 (`_slack`)."""

    @classmethod
    def of(cls, config: SchedulerConfig, first_step: int = 0) -> Bounds:
        """Derive the bounds from a configuration."""
        return cls(
            first_step=first_step,
            max_off_policy_steps=config.max_off_policy_steps,
            verifies=config.on_update == "verify",
            max_runahead_groups=config.runahead_groups - _slack(config),
        )


def _slack(config: SchedulerConfig) -> int:
    """Groups by which less is started than staleness allows, if nothing can be verified.

    With dynamic sampling a group may turn out to be in a later step than expected. One step of
    slack lets it be trained on then; without it, it would have to be drawn again.
    """
    has_slack = config.dynamic_sampling.enabled and config.on_update != "verify"
    return config.groups_per_step if has_slack and config.max_off_policy_steps > 1 else 0


class Admission:
    """Decides how far ahead groups may be started, and how old a token may be.

    >>> admission = Admission.of(SchedulerConfig(on_update="keep", groups_per_step=4))
    >>> admission.last_group(policy_version=0, ahead=True)
    3
    >>> admission.min_version(step=2)
    2
    >>> one = SchedulerConfig(on_update="keep", max_off_policy_steps=1)
    >>> admission.change(Bounds.of(one, first_step=2))
    >>> admission.min_version(step=1), admission.min_version(step=2)
    (1, 1)
    >>> admission.last_group(policy_version=1, ahead=True)
    11
    """

    def __init__(self, groups_per_step: int, bounds: Bounds) -> None:
        self.groups_per_step = groups_per_step
        self.bounds = [bounds]
        """Bounds by their first step, ascending, from step 0 on."""
        self.verifies = bounds.verifies
        """True if tokens can be verified: there are, or were, bounds that need it."""

    @classmethod
    def of(
        cls, config: SchedulerConfig, changes: Mapping[int, SchedulerConfig] = MappingProxyType({})
    ) -> Admission:
        """Derive the rule from a configuration, with other ones from some steps on."""
        admission = cls(config.groups_per_step, Bounds.of(config))
        for step, changed in changes.items():
            admission.change(Bounds.of(changed, step))
        return admission

    def change(self, bounds: Bounds) -> None:
        """Set other bounds from a step on, of which no group was ever issued."""
        kept = [one for one in self.bounds if one.first_step != bounds.first_step]
        self.bounds = sorted([*kept, bounds])
        self.verifies |= bounds.verifies

    def forget_before(self, step: int) -> None:
        """Drop bounds that ended before this step and differ from earlier ones in depth only.

        A run that chooses its depth changes them for as long as it trains. Steps that a lost
        trainer takes back have the depth of the bounds before.
        """
        kept: list[Bounds] = []
        ends = [one.first_step for one in self.bounds[1:]]
        for one, end in zip(self.bounds, [*ends, 1 << 62], strict=True):
            if end > step or not kept or kept[-1][1:3] != one[1:3]:
                kept.append(one)
        self.bounds = kept

    @property
    def max_groups_in_flight(self) -> int:
        """Upper bound on the groups that are issued and not consumed."""
        return max(
            (one.max_off_policy_steps + 1) * self.groups_per_step + one.max_runahead_groups
            for one in self.bounds
        )

    def of_step(self, step: int) -> Bounds:
        """Return the bounds of a step."""
        return next(one for one in reversed(self.bounds) if one.first_step <= step)

    def last_group(self, policy_version: int, *, ahead: bool) -> int:
        """Return the last group that may start under this version, as all groups before it may.

        Unless `ahead`, only groups count for which tokens of this version need no verification.
        """
        if len(self.bounds) == 1:
            return self._limit(self.bounds[0], policy_version, ahead=ahead)
        reached = -1
        for one, last in self._with_last_groups():
            first = one.first_step * self.groups_per_step
            limit = self._limit(one, policy_version, ahead=ahead)
            if limit < last:
                return max(limit, first - 1)
            reached = last
        return reached

    def last_deliverable_group(self, policy_version: int) -> int:
        """Return a group such that no later one can have been delivered up to this version.

        If the bounds have become wider, a step can be delivered before earlier ones.
        """
        ends = [
            min(self._limit(one, policy_version, ahead=False), last)
            for one, last in self._with_last_groups()
            if self._limit(one, policy_version, ahead=False)
            >= one.first_step * self.groups_per_step
        ]
        return max(ends, default=-1)

    def first_version_to_start(self, group: int) -> int:
        """Return the lowest version under which the group's samples may be started."""
        return max(
            -((self._limit(one, 0, ahead=True) - min(group, last)) // self.groups_per_step)
            for one, last in self._with_last_groups()
            if one.first_step * self.groups_per_step <= group
        )

    def min_version(self, step: int) -> int:
        """Return the lowest policy version that may have drawn a token that this step trains on.

        Never negative: a token of an unknown policy (`UNKNOWN_VERSION`) is always too old.
        """
        return max(0, step - self.of_step(step).max_off_policy_steps)

    def versions_ahead(self, step: int, policy_version: int) -> int:
        """Return by how many versions a sample of this step would run ahead; 0 if it is due."""
        return max(0, step - self.of_step(step).max_off_policy_steps - policy_version)

    def _limit(self, bounds: Bounds, version: int, *, ahead: bool) -> int:
        """Return the last group that these bounds alone admit under this version."""
        groups = (version + bounds.max_off_policy_steps + 1) * self.groups_per_step - 1
        return groups + bounds.max_runahead_groups if ahead else groups

    def _with_last_groups(self) -> list[tuple[Bounds, int]]:
        following = [one.first_step * self.groups_per_step - 1 for one in self.bounds[1:]]
        return list(zip(self.bounds, [*following, 1 << 62], strict=True))
