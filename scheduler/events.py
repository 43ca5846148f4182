"""Events: the facts that the scheduler receives.

They contain no sockets, no clock and no payloads. The controller makes them from the messages on
the wire, in the order of receipt. Repeated and late events change nothing; impossible ones raise
ImpossibleEvent.
"""

import msgspec

from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler.config import SchedulerConfig


class Event(msgspec.Struct, frozen=True):
    """A fact that the scheduler receives."""


class GeneratorJoined(Event, frozen=True, gc=False):
    """A generator can take work. Names are never reused: a restarted generator has a new name.

    Ignored after `GeneratorLost` for the same name: the process watch may notice a death before the
    messages of that process have been read.
    """

    generator: str
    slots: int
    """Samples that it decodes at once, at least 1."""
    policy_version: int
    """Version that it samples from; -1 if it has not installed any published weights."""


class GeneratorLost(Event, frozen=True, gc=False):
    """A generator is gone, with all samples that it held. It may not have joined yet."""

    generator: str


class GeneratorLeaves(Event, frozen=True, gc=False):
    """The user ordered a joined generator to leave: see `scheduler.scheduler`."""

    generator: str


class SamplesReleased(Event, frozen=True, gc=False):
    """The answer to `ReleaseSamples`: the generator does not have these samples any more."""

    generator: str


class SampleFinished(Event, frozen=True, gc=False):
    """A generator finished a sample and holds it. Its reward may still be being computed."""

    generator: str
    sample: SampleId
    length: int
    oldest_version: int
    """Lowest policy version among the sample's segments."""


class SampleRewarded(Event, frozen=True, gc=False):
    """The reward of a held sample is computed. With dynamic sampling only.

    It is for the contents that the generator reported last: it comes after each `SampleFinished`,
    again if the sample was verified and has not changed.
    """

    generator: str
    sample: SampleId
    reward: float


class SampleFailed(Event, frozen=True, gc=False):
    """A sample cannot be generated or scored, and another attempt would fail as well."""

    generator: str
    sample: SampleId
    reason: str


class SampleDelivered(Event, frozen=True, gc=False):
    """The trainer acknowledged a sample: the sample is safe even if its generator is lost."""

    generator: str
    """The delivering generator. It may be lost: the acknowledgement can arrive late."""
    sample: SampleId


class WeightsInstalled(Event, frozen=True, gc=False):
    """The answer to `InstallWeights`: the version that the generator now samples from.

    Every `InstallWeights` must be answered. If the weights were overwritten by newer ones before
    they could be read, the answer names the generator's old version, and the scheduler commands the
    latest one.
    """

    generator: str
    policy_version: int


class KvUsed(Event, frozen=True, gc=False):
    """The use of a generator's KV space; reported periodically."""

    generator: str
    share: float
    """Share of the KV space in use, 0 to 1."""


class EnvironmentWaits(Event, frozen=True, gc=False):
    """A periodic report of how many RUNNING samples wait for their environment, without a slot."""

    generator: str
    samples: int


class SpeedMeasured(Event, frozen=True, gc=False):
    """A generator's speed, averaged over some busy time; reported occasionally."""

    generator: str
    tokens_per_row_second: float


class WeightsPublished(Event, frozen=True, gc=False):
    """The trainer published the weights of this version; generators can install them."""

    policy_version: int


class StepFinished(Event, frozen=True, gc=False):
    """The trainer finished optimizer step `step` and consumed exactly these groups."""

    step: int
    """The step, from 0; the policy version is now step + 1."""
    groups: tuple[int, ...]


class TrainerJoined(Event, frozen=True, gc=False):
    """A trainer can take trajectories and has published its weights of this version.

    The first one has the version that the run begins with. Each later one replaces a lost trainer
    and continues from a checkpoint, which may be older: see `asyncrl.scheduler.scheduler`.
    """

    policy_version: int
    lineage: int = 0
    """Number of trainers before this one. Repeated events of a lineage are ignored."""


class TrainerLost(Event, frozen=True, gc=False):
    """The trainer is gone, with its weights, its step and every trajectory that it had."""


class GeneratorRewound(Event, frozen=True, gc=False):
    """The answer to `RewindGenerator`. The generator's later reports are of this lineage.

    It holds no token of a later version than the ordered one, except as tokens of an unknown
    policy, and no delivery to an earlier trainer.
    """

    generator: str
    lineage: int
    policy_version: int
    """Version that it samples from; -1 if the policy of its weights is gone. It then samples
    nothing until it has installed others."""


class BoundsChanged(Event, frozen=True, gc=False):
    """Changes the bounds of steps of which nothing is begun.

    The user does, or the run itself does (`asyncrl.scheduler.run_ahead`).
    """

    configs: dict[int, SchedulerConfig]
    """Configurations by the first step that has each. Only `max_off_policy_steps`, `on_update` and
    `max_runahead_groups` differ."""


class DrainRequested(Event, frozen=True, gc=False):
    """Begin no group, train the steps whose groups are all begun, then end the run."""


class StopRequested(Event, frozen=True, gc=False):
    """Finish the current step, then end the run (`asyncrl.scheduler.scheduler`)."""


class StepGivenUp(Event, frozen=True, gc=False):
    """The current step of a run that is stopping lacks rewards that do not come."""

    reason: str


class PauseRequested(Event, frozen=True, gc=False):
    """Start no samples and make every generator stop generating; discard nothing."""


class ResumeRequested(Event, frozen=True, gc=False):
    """Resume after a pause."""
