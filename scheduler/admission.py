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
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides how far ahead groups may be started, and how old a token may be.

    Example:
        >>> admission = Admission.of(SchedulerConfig(on_update="keep", groups_per_step=4))
        >>> admission.last_group_to_start(policy_version=0)
        3
        >>> admission.min_version(step=2)
        2
    """

    groups_per_step: int
    max_off_policy_steps: int
    """k: the largest staleness that a token may have when it is trained on."""
    verifies: bool
    """Whether tokens that are too old are verified. If not, they must never be generated."""
    max_runahead_groups: int
    """Groups that may be started beyond those that need no verification; 0 unless `verifies`."""

    @classmethod
    def of(cls, config: SchedulerConfig) -> Admission:
        """The rule that a configuration asks for."""
        return cls(
            groups_per_step=config.groups_per_step,
            max_off_policy_steps=config.max_off_policy_steps,
            verifies=config.on_update == "verify",
            max_runahead_groups=config.runahead_groups,
        )

    @property
    def max_groups_in_flight(self) -> int:
        """Upper bound on the groups that are issued and not consumed."""
        return (self.max_off_policy_steps + 1) * self.groups_per_step + self.max_runahead_groups

    def last_group_to_start(self, policy_version: int) -> int:
        """The last group whose samples may be started under this version."""
        return self.last_due_group(policy_version) + self.max_runahead_groups

    def last_due_group(self, policy_version: int) -> int:
        """The last group whose tokens need no verification if drawn under this version."""
        return (policy_version + self.max_off_policy_steps + 1) * self.groups_per_step - 1

    def first_version_to_start(self, group: int) -> int:
        """The lowest version under which the group's samples may be started."""
        return -((self.last_group_to_start(0) - group) // self.groups_per_step)

    def min_version(self, step: int) -> int:
        """The lowest policy version that may have drawn a token that this step trains on.

        Never negative: a token of an unknown policy (`UNKNOWN_VERSION`) is always too old.
        """
        return max(0, step - self.max_off_policy_steps)

    def versions_ahead(self, step: int, policy_version: int) -> int:
        """By how many versions a sample of this step would run ahead; 0: it is due."""
        return max(0, step - self.max_off_policy_steps - policy_version)
