"""The section `scheduler:` of a run's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from asyncrl.scheduler.run_ahead import OWN
from asyncrl.wire.transport.paths import WEEK_SECONDS

OnUpdate = Literal["verify", "keep", "recompute"]
RunAheadGroups = Annotated[int, Field(ge=0, le=10**7)]


def _null_is_auto(value: object) -> object:
    return "auto" if value is None else value


class DynamicSamplingConfig(BaseModel):
    """Steps of groups that all carry signal: groups whose rewards are all equal are left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = False
    """Train each step on the next groups_per_step groups *in data order* whose rewards are not all
    equal (DAPO's dynamic sampling). A group without signal is left out and counted. Further groups
    are generated in its place, ahead of time by the share with signal so far. Those that a step
    does not need belong to the next one. It changes the objective: prompts that are always or never
    answered right are not trained on (docs/algorithms.md)."""

    max_batches: int = Field(default=10, ge=1, le=1000)
    """Groups that a step may look at, in multiples of groups_per_step. If they contain fewer than
    groups_per_step groups with signal, the step trains on those, with a warning; if none has
    signal, the run ends. It also bounds the groups in flight."""


class SchedulerConfig(BaseModel):
    """Limits of how far generation may run ahead of training, and of the work in flight."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_off_policy_steps: int = Field(default=0, ge=0, le=10_000)
    """Maximum staleness, in steps of the run: a token may be at most this many steps older than the
    policy that trains on it. With `on_update: verify`, older tokens are verified first, so that 0
    is strictly on-policy. With `keep` and `recompute`, 0 is synchronous RL, and a value above 0
    lets generators run ahead by that many steps."""

    on_update: OnUpdate = "verify"
    """Fate of running and waiting samples when new weights arrive. `verify`: tokens that would be
    older than max_off_policy_steps are verified; the accepted prefix is kept and the rest
    regenerated, so that the answer follows the new policy exactly (docs/exactness.md). `keep`:
    samples continue with their old KV, so an answer may have segments of several policy versions,
    at most max_off_policy_steps old. `recompute`: like `keep`, with KV rebuilt under the new
    weights."""

    partial_rollout: bool = True
    """Allow new weights in the middle of a sample. If false, each sample has a single policy
    version: a generator first finishes its running samples, and waits for its longest answer."""

    max_runahead_groups: Annotated[
        RunAheadGroups | Literal["auto"], BeforeValidator(_null_is_auto)
    ] = "auto"
    """Run-ahead, in groups (`on_update: verify` only): how many groups may be started before the
    policy version that they need is published. `auto`: the run tries which number of whole steps
    trains most tokens a second; it begins with none where the trainer and a generator share
    processors, and with two otherwise."""

    runahead_kv_limit: float = Field(default=0.9, gt=0, le=1)
    """Limit of run-ahead, as a share of a generator's KV space: a generator that uses this share or
    more starts no run-ahead samples, which leaves room for due work."""

    sample_deadline_seconds: float | None = Field(default=None, gt=0, le=WEEK_SECONDS)
    """Time limit of a sample, in seconds from its first token, environments included: it then ends
    with finish reason `deadline`, which is counted and shown. Which samples are cut depends on the
    load of the machine, so their ends do not follow the policy: a safety net and not a length limit
    (sampling.max_tokens). null: no deadline."""

    group_size: int = Field(default=8, ge=1, le=1 << 16)
    """Samples per group: how many answers are generated for one prompt at one visit."""

    groups_per_step: int = Field(default=16, ge=1, le=10**6)
    """Groups that one optimizer step trains on; group g belongs to step g // groups_per_step,
    unless `dynamic_sampling` is enabled."""

    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    max_in_flight_per_generator: int | None = Field(default=None, ge=1, le=10**6)
    """Maximum number of samples issued to one generator and not finished yet. null: its slots plus
    a few (a quarter of the slots, at most one group) that wait in its own queue, so that a free
    slot is filled without asking the controller."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Number of times that a sample is started before it counts as failed. A generator that dies
    uses up one attempt of each sample that it had not delivered."""

    @model_validator(mode="after")
    def _run_ahead_is_verified(self) -> SchedulerConfig:
        if self.max_runahead_groups != "auto" and self.on_update != "verify":
            raise ValueError(
                f"scheduler.max_runahead_groups: {self.max_runahead_groups} needs "
                f"scheduler.on_update: verify, not {self.on_update}: run-ahead work is always "
                "verified before it is trained on (to run ahead without verification, set "
                "scheduler.max_off_policy_steps)"
            )
        if self.dynamic_sampling.enabled and self.group_size < 2:
            raise ValueError(
                "scheduler.dynamic_sampling.enabled: a group of one sample never carries signal, "
                "since its rewards are all equal; use scheduler.group_size 2 or more"
            )
        if self.on_update == "recompute" and not self.partial_rollout:
            raise ValueError(
                "scheduler.partial_rollout: false leaves no running sample at an update whose KV "
                "could be rebuilt; use scheduler.on_update: keep, or partial_rollout: true"
            )
        return self

    @property
    def max_groups_of_step(self) -> int | None:
        """Most groups that a step looks at with dynamic sampling; None without it."""
        sampling = self.dynamic_sampling
        return sampling.max_batches * self.groups_per_step if sampling.enabled else None

    @property
    def runahead_groups(self) -> int:
        """Groups that may run ahead of their version; with `auto` before anything is measured."""
        if self.on_update != "verify":
            return 0
        if self.max_runahead_groups == "auto":
            return OWN * self.groups_per_step
        return self.max_runahead_groups

    @property
    def chooses_run_ahead(self) -> bool:
        """True if the run decides how far it runs ahead (`auto`)."""
        return self.on_update == "verify" and self.max_runahead_groups == "auto"

    def with_run_ahead(self, groups: int) -> SchedulerConfig:
        """Return these settings with this many groups in place of `auto`."""
        changed = {"max_runahead_groups": groups} if self.chooses_run_ahead else {}
        return self.model_copy(update=changed)

    def in_flight_limit(self, slots: int) -> int:
        """Maximum number of unfinished samples of a generator with this many slots."""
        if self.max_in_flight_per_generator is not None:
            return self.max_in_flight_per_generator
        return slots + min(self.group_size, max(1, slots // 4))
