"""What the scheduler decides. The controller carries these out in the order given."""

from __future__ import annotations

from enum import Enum

import msgspec

from rollout.trajectory import SampleId


class StartSample(msgspec.Struct, frozen=True, gc=False):
    """Have a generator write a sample and hold it. A reissued sample keeps its id."""

    generator: str
    sample: SampleId
    priority: int = 0
    """0: its tokens can be trained on as they are. Above: run-ahead, by so many versions."""


class VerifySamples(msgspec.Struct, frozen=True):
    """Have a generator verify what it has of these samples, and write on from what is accepted.

    Only tokens of a version below `min_version` are the reason: a generator that verifies or
    verified them under a version from there on need not do it again.
    """

    generator: str
    samples: tuple[SampleId, ...]
    min_version: int
    """The generator has installed it, or a newer one."""


class InstallWeights(msgspec.Struct, frozen=True, gc=False):
    """Have a generator swap to this version; at most one is outstanding per generator."""

    generator: str
    policy_version: int


class DeliverGroup(msgspec.Struct, frozen=True):
    """Have the holders of a group's finished samples send them to the trainer.

    Normally the whole group from one generator. After a loss only the samples that the trainer
    does not have yet, from the generator that wrote them again.
    """

    step: int
    """The step that will train on them."""
    group: int
    samples: tuple[tuple[str, SampleId], ...]
    """(generator, sample) pairs, by sample."""


class DeclareStep(msgspec.Struct, frozen=True):
    """Tell the trainer the final membership of a step. Once per step, in the order of steps.

    Every group named is in the trainer already, so nothing can change the set any more.
    """

    step: int
    groups: tuple[int, ...]
    """Ascending, at least one; groups of the step that are missing have failed."""


class DiscardSamples(msgspec.Struct, frozen=True):
    """Have a generator abort or forget these samples."""

    generator: str
    samples: tuple[SampleId, ...]


class ReportGroupFailed(msgspec.Struct, frozen=True, gc=False):
    """Tell the user that this group is not trained on, and why. Once per group."""

    group: int
    reason: str


class PauseGenerator(msgspec.Struct, frozen=True, gc=False):
    """Have a generator stop drawing tokens and keep its state."""

    generator: str


class ResumeGenerator(msgspec.Struct, frozen=True, gc=False):
    """Have a generator go on drawing tokens."""

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
    """Why the run failed, or why a stopped run did not train the step in hand; else empty."""


Command = (
    StartSample
    | VerifySamples
    | InstallWeights
    | DeliverGroup
    | DeclareStep
    | DiscardSamples
    | ReportGroupFailed
    | PauseGenerator
    | ResumeGenerator
    | FinishRun
)
