"""What a user may set about scheduling: the section `scheduler:` of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

OnUpdate = Literal["verify", "keep", "recompute"]


class SchedulerConfig(BaseModel):
    """How far generation may run ahead of training, and how much work is in flight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_off_policy_steps: int = Field(default=1, ge=0)
    """Bound on staleness: a token may be at most this many optimizer steps older than the policy
    that trains on it. 0 is synchronous RL; above 0 generators run ahead by so many steps."""

    on_update: OnUpdate = "keep"
    """What happens to running samples when new weights arrive. `keep`: they go on under the new
    weights, so one answer may have segments of several policy versions."""

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
        if value != "keep":
            raise ValueError(
                f"scheduler.on_update: '{value}' is not built yet; use 'keep' "
                "('verify' and 'recompute' come in a later version)"
            )
        return value

    def in_flight_limit(self, slots: int) -> int:
        """Most unfinished samples that a generator with so many slots is given."""
        if self.max_in_flight_per_generator is not None:
            return self.max_in_flight_per_generator
        return slots + min(self.group_size, max(1, slots // 4))
