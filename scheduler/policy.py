"""How far generation may run ahead: the synchronous loop and the pipelined one, side by side.

Step b trains policy version b into version b + 1. A sample for step b may be *started* on a
generator whose installed version is v when

    synchronous     b <= v          generate with what is trained next
    asynchronous    b <= v + k      generate up to k steps ahead

That is the only difference between the two, and k = 0 makes them equal. Everything else
(placement, refill, delivery, membership of steps) is the same code.

                synchronous (k = 0)                    asynchronous (k > 0, `on_update: keep`)
generators      ▓▓▓▓▓▓▓▓░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░         ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
trainer         ░░░░░░░░▓▓▓▓▓▓▓▓░░░░░░░░▓▓▓▓▓▓         ░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓

loop            | synchronous                          | asynchronous
----------------+--------------------------------------+------------------------------------
generate
  consumes      | groups of step b                     | groups of steps b .. b + k
  produces      | finished samples, held               | the same
  waits for     | version b installed                  | version b' - k installed, for step b'
  unblocked by  | WeightsInstalled(b)                  | WeightsInstalled(b' - k)
  bounded by    | groups_per_step groups,              | (k + 1) * groups_per_step groups,
                | in-flight limit per generator        | the same limit
deliver
  consumes      | a group with all samples finished    | the same
  produces      | trajectories in the trainer          | the same, also for later steps
  waits for     | the trainer's acknowledgements       | the same
  unblocked by  | SampleDelivered                      | the same
  bounded by    | groups_per_step groups               | (k + 1) * groups_per_step groups
train
  consumes      | the groups of step b, all of them    | the same: membership is fixed by index,
                |                                      | so no step favours short answers
  produces      | version b + 1                        | the same
  waits for     | each group delivered or failed       | the same
  unblocked by  | DeclareStep(b)                       | the same
  bounded by    | one step at a time                   | the same
install
  consumes      | version b + 1 (newest published)     | the same
  produces      | a generator on the new version       | the same, in the middle of samples
  waits for     | that generator's last install        | the same: slow ones skip versions
  unblocked by  | WeightsInstalled                     | the same
  bounded by    | one install per generator            | the same

Why the bound holds: a sample is started for step b on a generator whose version is at least b - k,
and a generator's version never goes back. So every token of the sample is drawn under a version of
at least b - k. Step b is trained as version b. Hence the staleness of each token, b minus its
version, is at most k. Nothing is ever dropped for being stale, so long answers do not starve:
staleness is bounded by pacing what is started.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Generate, then train, then generate with the new weights. Staleness 0."""

    def newest_step(self, policy_version: int) -> int:
        """The last step whose samples may be started under this version."""
        return policy_version


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Generate up to `max_off_policy_steps` steps ahead of training. Staleness at most that."""

    max_off_policy_steps: int

    def newest_step(self, policy_version: int) -> int:
        """The last step whose samples may be started under this version."""
        return policy_version + self.max_off_policy_steps


Policy = Synchronous | Asynchronous


def policy_for(config: SchedulerConfig) -> Policy:
    """Synchronous when no staleness is allowed, asynchronous otherwise."""
    if config.max_off_policy_steps == 0:
        return Synchronous()
    return Asynchronous(config.max_off_policy_steps)
