"""How far generation may run ahead: the synchronous loop and the pipelined ones, side by side.

Step b trains policy version b into version b + 1. Groups have a fixed order; group g belongs to
step g // groups_per_step. A group may be *started* on a generator whose installed version is v when
its step is at most

    synchronous     v          generate with what is trained next
    keep, recompute v + k      up to k steps ahead; tokens are up to k versions old when trained on
    verify          v + k, and max_runahead_groups groups more, which are verified before use

k is `max_off_policy_steps`; with k = 0 `keep` is synchronous. `recompute` differs from `keep` only
inside the generator, which rebuilds the KV of running samples. Everything else (placement, refill,
delivery, membership of steps) is the same code.

                synchronous                            keep (k > 0) and verify
generators      ▓▓▓▓▓▓▓▓░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
trainer         ░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░░░▓▓▓▓▓▓         ░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓

loop            | synchronous (k = 0)      | keep (k > 0)             | verify (k >= 0)
----------------+--------------------------+--------------------------+--------------------------
generate
  consumes      | groups of step b         | groups of steps b..b+k   | those, and run-ahead ones
  produces      | finished samples, held   | the same                 | the same
  waits for     | version b installed      | version b' - k, for b'   | the same, less run-ahead
  unblocked by  | WeightsInstalled(b)      | WeightsInstalled(b' - k) | the same
  bounded by    | groups_per_step groups,  | (k+1) * groups_per_step, | + max_runahead_groups,
                | in-flight limit each     | the same limit           | the same limit
verify
  consumes      |                          |                          | running and held samples
                |                          |                          | with tokens older than b-k
  produces      |                          |                          | samples of versions >= b-k
  waits for     |                          |                          | version b - k installed
  unblocked by  |                          |                          | WeightsInstalled(b - k)
  bounded by    |                          |                          | once per sample and place
deliver
  consumes      | a finished group         | the same                 | one without older tokens
  produces      | trajectories in the trainer, also for later steps
  waits for     | the trainer's acknowledgements
  unblocked by  | SampleDelivered
  bounded by    | the groups in flight
train
  consumes      | the groups of step b, all of them: membership is fixed by index, so no step
                | favours short answers
  produces      | version b + 1
  waits for     | each group delivered or failed
  unblocked by  | DeclareStep(b)
  bounded by    | one step at a time
install
  consumes      | version b + 1 (newest published)
  produces      | a generator on the new version, in the middle of samples
  waits for     | that generator's last install: slow ones skip versions; with
                | `partial_rollout: false` also for the samples that it is writing
  unblocked by  | WeightsInstalled
  bounded by    | one install per generator

Why the bound holds. `keep`: a sample is started for step b on a generator whose version is at least
b - k, and a generator's version never goes back, so every token of it is drawn under a version of
at least b - k. `verify`: a sample with an older token is not delivered; it is verified by a
generator whose version is at least b - k, and what comes out has tokens of that version or newer
only. Step b is trained as version b, hence the staleness of each token is at most k. Nothing is
ever dropped for being stale, so long answers do not starve.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """How far ahead groups may be started, and how old a token may be."""

    groups_per_step: int
    max_off_policy_steps: int
    """k, the bound on staleness."""
    max_runahead_groups: int
    """Groups that may be started beyond those whose tokens would be young enough; 0: none."""

    @property
    def verifies(self) -> bool:
        """Whether work that is too old is verified. Otherwise none must come to be."""
        return self.max_runahead_groups > 0

    @property
    def most_in_flight(self) -> int:
        """Most groups issued and not consumed."""
        return (self.max_off_policy_steps + 1) * self.groups_per_step + self.max_runahead_groups

    def newest_group(self, policy_version: int) -> int:
        """The last group of which a sample may be started under this version."""
        return self.newest_due_group(policy_version) + self.max_runahead_groups

    def newest_due_group(self, policy_version: int) -> int:
        """The last group whose tokens, drawn under this version, need no verification."""
        return (policy_version + self.max_off_policy_steps + 1) * self.groups_per_step - 1

    def oldest_version(self, step: int) -> int:
        """The lowest policy version that a token may have which this step trains on."""
        return step - self.max_off_policy_steps


def policy_for(config: SchedulerConfig) -> Policy:
    """What the configuration asks for."""
    return Policy(config.groups_per_step, config.max_off_policy_steps, config.runahead_groups)
