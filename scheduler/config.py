"""What a user may set about scheduling: the section `scheduler:` of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

OnUpdate = Literal["verify", "keep", "recompute"]


class SchedulerConfig(BaseModel):
    """How far generation may run ahead of training, and how much work is in flight."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_off_policy_steps: int = Field(default=0, ge=0)
    """Bound on staleness: a token may be at most this many optimizer steps older than the policy
    that trains on it. With `on_update: verify` older tokens are verified first, so that 0 is
    strictly on-policy. With `keep` and `recompute`, 0 is synchronous RL, and above 0 generators
    run ahead by so many steps."""

    on_update: OnUpdate = "verify"
    """What becomes of running and waiting samples when new weights arrive. `verify`: tokens that
    would be older than max_off_policy_steps are verified under the new weights; what they accept is
    kept, the rest is written again, exactly as the new policy would (docs/exactness.md). With
    max_off_policy_steps 0 all training is then strictly on-policy. `keep`: running samples go on
    under the new weights with the KV that they have, so one answer may have segments of several
    policy versions, at most max_off_policy_steps old. `recompute`: the same, but their KV is
    rebuilt under the new weights."""

    partial_rollout: bool = True
    """Whether new weights may come in the middle of a sample. False: a generator finishes what it
    is writing first and starts nothing meanwhile, so each sample is of one version, and generators
    wait for their longest answer at every update."""

    max_runahead_groups: int | None = Field(default=None, ge=1)
    """`verify` only: groups that may be started before the version is there that they will be
    trained by. None: two whole steps (2 * groups_per_step), so that an answer may take as long as
    three steps before anybody waits for it. More than three steps gain nothing in simulations."""

    runahead_kv_limit: float = Field(default=0.9, gt=0, le=1)
    """`verify` only: a generator that uses this share of its KV space or more starts nothing ahead
    of time, so that due work finds room."""

    sample_deadline_seconds: float | None = Field(default=None, gt=0)
    """A sample that is not finished so long after it was started ends with what it has: finish
    reason `deadline`, counted and shown. What is cut then depends on the machine's load, so such
    samples do not follow the policy to their end: a safety net, not a length limit (that is
    sampling.max_tokens). None: no deadline."""

    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt at one visit."""

    groups_per_step: int = Field(default=16, ge=1)
    """Groups that one optimizer step consumes; group g belongs to step g // groups_per_step."""

    max_in_flight_per_generator: int | None = Field(default=None, ge=1)
    """Most samples issued to one generator and not finished yet. None: its slots plus a few
    (a quarter of the slots, at most one group) that wait in its own queue, so that a slot that
    becomes free is filled without asking the controller."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """How often a sample is started before it counts as failed; a generator that dies uses up
    one attempt of each sample that it had not delivered."""

    @model_validator(mode="after")
    def _run_ahead_is_verified(self) -> SchedulerConfig:
        if self.max_runahead_groups is not None and self.on_update != "verify":
            raise ValueError(
                f"scheduler.max_runahead_groups: {self.max_runahead_groups} needs "
                f"scheduler.on_update: verify, not {self.on_update}: work that runs ahead is never "
                "trained on unverified (max_off_policy_steps is how far 'keep' runs ahead)"
            )
        if self.on_update == "recompute" and not self.partial_rollout:
            raise ValueError(
                "scheduler.partial_rollout: false leaves nothing running at an update whose KV "
                "could be rebuilt; use scheduler.on_update: keep, or partial_rollout: true"
            )
        return self

    @property
    def runahead_groups(self) -> int:
        """Groups that are started ahead and verified before they are trained on."""
        if self.on_update != "verify":
            return 0
        if self.max_runahead_groups is None:
            return 2 * self.groups_per_step
        return self.max_runahead_groups

    def in_flight_limit(self, slots: int) -> int:
        """Most unfinished samples that a generator with so many slots is given."""
        if self.max_in_flight_per_generator is not None:
            return self.max_in_flight_per_generator
        return slots + min(self.group_size, max(1, slots // 4))
