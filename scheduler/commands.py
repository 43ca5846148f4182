"""Commands: what the scheduler decides and the controller carries out.

They are carried out in the order given.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from asyncrl.rollout.trajectory import SampleId


class StartSample(msgspec.Struct, frozen=True, gc=False):
    """Have a generator generate a sample and hold it. A reissued sample keeps its id."""

    generator: str
    sample: SampleId
    priority: int = 0
    """0: the tokens can be trained on without verification. Above 0: the sample runs ahead, by this
    many policy versions."""


class VerifySamples(msgspec.Struct, frozen=True):
    """Have a generator verify the tokens of these samples and resume from the accepted prefix.

    Only tokens of versions below `min_version` require it. A generator that has verified a sample
    under `min_version` or a later version, or is doing so, need not verify it again.
    """

    generator: str
    samples: tuple[SampleId, ...]
    min_version: int
    """Lowest version that the tokens may have; the generator has installed it or a later one."""


class InstallWeights(msgspec.Struct, frozen=True):
    """Have a generator install this version; at most one install is outstanding per generator."""

    generator: str
    policy_version: int
    verify: tuple[VerifySamples, ...] = ()
    """What becomes due with this version, in data order. The generator begins with it as soon as
    the version is installed, before it reports so, and drops it if the version is not installed."""


class RewindGenerator(msgspec.Struct, frozen=True, gc=False):
    """Tell a generator that the policies of later versions than this one are gone.

    It forgets its unacknowledged deliveries and relabels the tokens of later versions as those of
    an unknown policy. Answered by `GeneratorRewound`; until then it is given nothing else to do.
    """

    generator: str
    policy_version: int
    lineage: int
    """Of the trainer that continues from this version."""


class ReleaseSamples(msgspec.Struct, frozen=True):
    """Have a leaving generator write the tokens of these samples to a file, and forget the samples.

    Answered by `SamplesReleased`. They are then started elsewhere, with the tokens that they have.
    """

    generator: str
    samples: tuple[SampleId, ...]
    """Started there and not on their way to the trainer; at least one."""


class EndGenerator(msgspec.Struct, frozen=True, gc=False):
    """End a generator that has left: it has no sample any more. It counts as lost from now on."""

    generator: str


class DeliverGroup(msgspec.Struct, frozen=True):
    """Have the holders of a group's finished samples send them to the trainer.

    Normally this is the whole group, from one generator. After a loss it is only the samples that
    the trainer does not have yet, from the generator that regenerated them.
    """

    step: int
    """The step that trains on the group."""
    group: int
    samples: tuple[tuple[str, SampleId], ...]
    """(generator, sample) pairs, by sample."""


class DeclareStep(msgspec.Struct, frozen=True):
    """Tell the trainer the final membership of a step. Issued once per step, in step order.

    The trainer already has every group named here, so the set cannot change any more.
    """

    step: int
    groups: tuple[int, ...]
    """Group indices, ascending, at least one. Groups of the step that are missing here failed."""


class DiscardSamples(msgspec.Struct, frozen=True):
    """Have a generator abort or forget these samples."""

    generator: str
    samples: tuple[SampleId, ...]


class ReportGroupFailed(msgspec.Struct, frozen=True, gc=False):
    """Tell the user that this group is not trained on, and why. Issued once per group."""

    group: int
    reason: str


class ReportGroupWithoutSignal(msgspec.Struct, frozen=True, gc=False):
    """Tell the user that this group is not trained on, since its rewards are all equal.

    Issued once per group, with dynamic sampling only.
    """

    group: int
    step: int
    """That it would have been trained in."""
    reward: float
    """Of each of its samples."""


class PauseGenerator(msgspec.Struct, frozen=True, gc=False):
    """Have a generator stop generating and keep its state."""

    generator: str


class ResumeGenerator(msgspec.Struct, frozen=True, gc=False):
    """Have a generator resume generating."""

    generator: str


class RunOutcome(Enum):
    """How a run ended."""

    DONE = "done"
    """All steps are trained."""
    STOPPED = "stopped"
    """The user stopped it."""
    FAILED = "failed"
    """It cannot continue."""


class FinishRun(msgspec.Struct, frozen=True, gc=False):
    """The last decision of a run. Weights are still installed after it, for the evaluation."""

    outcome: RunOutcome
    reason: str = ""
    """Why the run failed, or why a stopped run did not train its current step; otherwise empty."""


Command = (
    StartSample
    | VerifySamples
    | InstallWeights
    | RewindGenerator
    | ReleaseSamples
    | EndGenerator
    | DeliverGroup
    | DeclareStep
    | DiscardSamples
    | ReportGroupFailed
    | ReportGroupWithoutSignal
    | PauseGenerator
    | ResumeGenerator
    | FinishRun
)
