"""What the scheduler is told. Facts only: no sockets, no clock, no payloads.

The controller makes these from the messages of the wire, in the order in which it received them.
Repeated and late events are welcome (they change nothing); impossible ones raise.
"""

from __future__ import annotations

import msgspec

from rollout.trajectory import SampleId


class GeneratorJoined(msgspec.Struct, frozen=True, gc=False):
    """A generator can take work. Names are never reused: one that comes back has a new name.

    Ignored after its `GeneratorLost`: what watches over processes may be quicker than their news.
    """

    generator: str
    slots: int
    """Samples that it decodes at once."""
    policy_version: int
    """The version that it samples from now; -1 if it has no published weights at all."""


class GeneratorLost(msgspec.Struct, frozen=True, gc=False):
    """A generator is gone with all that it held; perhaps before it joined."""

    generator: str


class SampleFinished(msgspec.Struct, frozen=True, gc=False):
    """A generator has written a sample, and holds it; its reward may still be computed."""

    generator: str
    sample: SampleId
    length: int
    """Response tokens."""
    oldest_version: int
    """Lowest policy version among its segments."""


class SampleFailed(msgspec.Struct, frozen=True, gc=False):
    """A sample cannot be had; asking again would fail again."""

    generator: str
    sample: SampleId
    reason: str


class SampleDelivered(msgspec.Struct, frozen=True, gc=False):
    """The trainer acknowledged a sample: it is safe there, whatever becomes of the generator."""

    generator: str
    """Who delivered it. Believed from a lost generator too: an acknowledgement can be late."""
    sample: SampleId


class WeightsInstalled(msgspec.Struct, frozen=True, gc=False):
    """The answer to `InstallWeights`: the version that the generator samples from now.

    Every `InstallWeights` must be answered. When the weights were overwritten by newer ones before
    they could be read, the answer names the old version; the newest is then commanded.
    """

    generator: str
    policy_version: int


class KvUsed(msgspec.Struct, frozen=True, gc=False):
    """How full a generator's KV space is; told now and then."""

    generator: str
    share: float
    """0 to 1."""


class WeightsPublished(msgspec.Struct, frozen=True, gc=False):
    """The trainer's weights of this version can be installed."""

    policy_version: int


class StepFinished(msgspec.Struct, frozen=True, gc=False):
    """The trainer has done optimizer step `step` and consumed exactly these groups."""

    step: int
    """From 0; the policy version is step + 1 now."""
    groups: tuple[int, ...]


class TrainerJoined(msgspec.Struct, frozen=True, gc=False):
    """The trainer can take trajectories, and its weights of this version are published."""

    policy_version: int


class StopRequested(msgspec.Struct, frozen=True, gc=False):
    """Finish the step in hand, then end; see `scheduler.scheduler` for what that means."""


class PauseRequested(msgspec.Struct, frozen=True, gc=False):
    """Start nothing and have every generator stop drawing tokens; keep everything."""


class ResumeRequested(msgspec.Struct, frozen=True, gc=False):
    """Go on after a pause."""


Event = (
    GeneratorJoined
    | GeneratorLost
    | SampleFinished
    | SampleFailed
    | SampleDelivered
    | WeightsInstalled
    | KvUsed
    | WeightsPublished
    | StepFinished
    | TrainerJoined
    | StopRequested
    | PauseRequested
    | ResumeRequested
)
