"""Trainer to controller."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.records.step import LearnerMetrics, TrainerTimes
from asyncrl.wire.records.wrong_policy import WrongPolicy
from asyncrl.wire.transport.decoding import Finite
from asyncrl.wire.weights.layout import WeightManifest

CheckpointFault = Literal["disk_full", "quota", "read_only", "io_error", "hanging"]
"""Why a disk does not take a checkpoint; the label of `asyncrl_checkpoints_failed_total`."""


class Message(msgspec.Struct, frozen=True, tag=lambda name: f"trainer.{name}"):
    """Base of this direction; the tag names the sender, as the controller's hub receives both."""


class TrainerReady(Message, frozen=True):
    """The model is loaded or resumed, and its weights are published."""

    policy_version: int
    """Optimizer steps done, which is also the index of the next step."""
    manifest: WeightManifest | None
    """None: another rank of the trainer publishes them."""
    metrics_port: int | None = None
    """None: it serves no metrics."""
    initial_weights: str = ""
    """Digest of the weights that the run started from; empty if the checkpoint that it was
    resumed from does not have it."""
    data_address: str = ""
    """Where it takes trajectories; empty: where every process of the run was told to begin with."""


class StepFinished(Message, frozen=True):
    """An optimizer step is done and its weights are published. Rank 0 says it for all ranks."""

    step: int
    """The step trained, from 0; the new policy version is step + 1."""
    groups: tuple[int, ...]
    """The groups it consumed, each exactly once."""
    manifest: WeightManifest
    metrics: LearnerMetrics
    times: TrainerTimes
    reward_terms: tuple[Finite, ...] = ()
    """Mean of what each reward function returned, over the samples that it scored; empty if it
    scored none."""


class CheckpointWritten(Message, frozen=True):
    """A checkpoint is complete on disk."""

    policy_version: int
    path: str


class CheckpointFailed(Message, frozen=True):
    """The disk did not take a checkpoint. Training continues."""

    policy_version: int
    cause: CheckpointFault
    reason: str
    """With its path, and the bytes needed and free."""
    retry_version: int
    """The trainer tries again at this policy version, or when it ends."""


class TrainerReport(Message, frozen=True):
    """Sent once a second, so it also shows that the process is alive."""

    policy_version: int
    queued_trajectories: int
    busy_seconds: float


class DeliveryRefused(Message, frozen=True):
    """A sample that was ordered came in another form than reported, or cannot be trained on."""

    generator: str
    sample: SampleId
    reason: str


class PeerCutOff(Message, frozen=True):
    """A generator sent so many frames that were refused that the trainer reads no more of it."""

    generator: str
    reason: str


class SuspectSample(msgspec.Struct, frozen=True):
    """A context of a sample whose recorded log-probabilities nothing explains."""

    prompt_tokens: bytes
    """`[P]` int32"""
    tokens: bytes
    """`[L]` int32"""
    recorded: bytes
    """`[L]` float32, the engine's."""
    expected: bytes
    """`[L]` float32, the trainer's; 0 for an observed token."""
    observed: bytes = b""
    """`[L]` uint8, 0 or 1: tokens that no policy has drawn, which are not compared; empty: none."""


class WrongPolicyFound(Message, frozen=True):
    """Tokens of a generator do not follow the policy that they should; it is not trained on them.

    With `run.on_wrong_policy: warn` it is.
    """

    found: WrongPolicy
    limit: float = 0.0
    """Mean difference of log-probabilities that rounding explains, in nats."""
    samples: tuple[SuspectSample, ...] = ()
    """For the generator to score again, where the trainer cannot tell the cause."""
    provisional: bool = False
    """Rounding may explain it: it is said, trained on, and ends nothing."""


class Failure(Message, frozen=True):
    """The process failed and is about to end."""

    reason: str
    user_error: bool


class Goodbye(Message, frozen=True):
    """The process ends because it was told to."""


FromTrainer = (
    TrainerReady
    | StepFinished
    | CheckpointWritten
    | CheckpointFailed
    | TrainerReport
    | DeliveryRefused
    | PeerCutOff
    | WrongPolicyFound
    | Failure
    | Goodbye
)
