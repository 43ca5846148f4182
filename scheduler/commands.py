"""Commands: the scheduler's decisions, which the controller executes in the order given."""

from enum import Enum

import msgspec

from asyncrl.rollout.trajectory import SampleId


class Command(msgspec.Struct, frozen=True):
    """A decision of the scheduler."""


class StartSample(Command, frozen=True, gc=False):
    """Make a generator generate a sample and hold it. A reissued sample keeps its id."""

    generator: str
    sample: SampleId
    priority: int = 0
    """0: the tokens can be trained on without verification. Above 0: the sample runs ahead, by this
    many policy versions."""


class VerifySamples(Command, frozen=True):
    """Make a generator verify the tokens of these samples and resume from the accepted prefix.

    Only tokens of versions below `min_version` require it. A generator that has verified a sample
    under `min_version` or a later version, or is doing so, need not verify it again.
    """

    generator: str
    samples: tuple[SampleId, ...]
    min_version: int
    """Lowest allowed version of the tokens; the generator has installed it or a later one."""


class InstallWeights(Command, frozen=True):
    """Make a generator install this version; at most one install is outstanding per generator."""

    generator: str
    policy_version: int
    verify: tuple[VerifySamples, ...] = ()
    """Verifications that become due with this version, in data order. The generator starts them as
    soon as the version is installed, before it reports so, and drops them if it is not
    installed."""


class RewindGenerator(Command, frozen=True, gc=False):
    """Make a generator forget the policies of later versions, which are gone.

    It forgets its unacknowledged deliveries and relabels the tokens of later versions as those of
    an unknown policy. Answered by `GeneratorRewound`; until then it gets no other work.
    """

    generator: str
    policy_version: int
    lineage: int
    """Lineage of the trainer that continues from this version."""


class ReleaseSamples(Command, frozen=True):
    """Make a leaving generator move these samples to a file. Answered by `SamplesReleased`."""

    generator: str
    samples: tuple[SampleId, ...]
    """Samples started there and not on their way to the trainer; at least one."""


class EndGenerator(Command, frozen=True, gc=False):
    """End a generator that has left, with no sample. It counts as lost from now on."""

    generator: str


class DeliverGroup(Command, frozen=True):
    """Make the holders of a group's finished samples send them to the trainer.

    Normally this is the whole group, from one generator. After a loss it is only the samples that
    the trainer does not have yet, from the generator that regenerated them.
    """

    step: int
    group: int
    samples: tuple[tuple[str, SampleId], ...]
    """Ascending by sample."""


class DeclareStep(Command, frozen=True):
    """Send the trainer, once, the final membership of a step; it has every group named here."""

    step: int
    groups: tuple[int, ...]
    """Group indices, ascending, at least one. Missing groups of the step failed."""


class DiscardSamples(Command, frozen=True):
    """Make a generator abort or forget these samples."""

    generator: str
    samples: tuple[SampleId, ...]


class ReportGroupFailed(Command, frozen=True, gc=False):
    """Report that this group is not trained on, and why. Issued once per group."""

    group: int
    reason: str


class ReportGroupWithoutSignal(Command, frozen=True, gc=False):
    """Report, once, that this group is not trained on, since its rewards are all equal."""

    group: int
    step: int
    reward: float


class PauseGenerator(Command, frozen=True, gc=False):
    """Make a generator stop generating and keep its state."""

    generator: str


class ResumeGenerator(Command, frozen=True, gc=False):
    """Make a generator resume generating."""

    generator: str


class RunOutcome(Enum):
    """The way in which a run ended."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


class FinishRun(Command, frozen=True, gc=False):
    """The last decision of a run. Weights are still installed after it, for the evaluation."""

    outcome: RunOutcome
    reason: str = ""
    """The reason of a failure, or of a stop without training the current step; otherwise empty."""
