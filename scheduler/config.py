"""What a user may set about scheduling: the section `scheduler:` of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

OnUpdate = Literal["verify", "keep", "recompute"]


class SchedulerConfig(BaseModel):
    """How far generation may run ahead of training, and how much work is in flight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_off_policy_steps: int = Field(default=1, ge=0)
    """Bound on staleness: a token may be at most this many optimizer steps older than the policy
    that trains on it. With `on_update: keep`, 0 is synchronous RL, and above 0
    generators run ahead by so many steps; with `verify` older tokens are verified first."""

    on_update: OnUpdate = "keep"
    """What becomes of running and waiting samples when new weights arrive. `keep`: they go on under
    the new weights, so one answer may have segments of several policy versions, at most
    max_off_policy_steps old. `verify`: tokens that would be older are verified under the new
    weights; what they accept is kept, the rest is written again, exactly as the new policy would
    (docs/exactness.md). With max_off_policy_steps 0 all training is then strictly on-policy."""

    max_runahead_groups: int | None = Field(default=None, ge=1)
    """`verify` only: groups that may be started before the version is there that they will be
    trained by. None: groups_per_step, one whole step ahead."""

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

    @field_validator("on_update")
    @classmethod
    def _only_what_is_built(cls, value: OnUpdate) -> OnUpdate:
        if value == "recompute":
            raise ValueError(
                "scheduler.on_update: 'recompute' is not built yet; use 'verify' or 'keep'"
            )
        return value

    @model_validator(mode="after")
    def _run_ahead_is_verified(self) -> SchedulerConfig:
        if self.max_runahead_groups is not None and self.on_update != "verify":
            raise ValueError(
                f"scheduler.max_runahead_groups: {self.max_runahead_groups} needs "
                f"scheduler.on_update: verify, not {self.on_update}: work that runs ahead is never "
                "trained on unverified (max_off_policy_steps is how far 'keep' runs ahead)"
            )
        return self

    @property
    def runahead_groups(self) -> int:
        """Groups that are started ahead and verified before they are trained on."""
        if self.on_update != "verify":
            return 0
        if self.max_runahead_groups is None:
            return self.groups_per_step
        return self.max_runahead_groups

    def in_flight_limit(self, slots: int) -> int:
        """Most unfinished samples that a generator with so many slots is given."""
        if self.max_in_flight_per_generator is not None:
            return self.max_in_flight_per_generator
        return slots + min(self.group_size, max(1, slots // 4))
