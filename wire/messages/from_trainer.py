"""Trainer to controller."""

from typing import Literal

import msgspec

from asyncrl.rollout.trajectory import FinishReason, SampleId
from asyncrl.wire.records.step import LearnerMetrics, TrainerTimes
from asyncrl.wire.records.wrong_policy import WrongPolicy
from asyncrl.wire.transport.decoding import Count, Finite
from asyncrl.wire.weights.layout import WeightManifest

CheckpointFault = Literal["disk_full", "quota", "read_only", "io_error", "hanging"]
"""Cause of a failed checkpoint; the label of `asyncrl_checkpoints_failed_total`."""


class Message(msgspec.Struct, frozen=True, tag=lambda name: f"trainer.{name}"):
    """Base of this direction; the tag names the sender, as the controller's hub receives both."""


class TrainerReady(Message, frozen=True):
    """The model is loaded or resumed, and its weights are published."""

    policy_version: int
    """Optimizer steps done, which is also the index of the next step."""
    manifest: WeightManifest | None
    """None: another rank of the trainer publishes them."""
    metrics_port: int | None = None
    initial_weights: str = ""
    """Digest of the run's initial weights; empty if the resumed checkpoint lacks it."""
    data_address: str = ""
    """Address that takes trajectories; empty: the initial address of the run."""


class ShownSample(msgspec.Struct, frozen=True):
    """A sample of a finished step, for the terminal (`run.print_samples`)."""

    prompt: str
    """Text with special tokens; the middle of a long one is left out, as in `response`."""
    response: str
    reward: Finite
    terms: tuple[Finite | None, ...]
    """Result of each reward function, None where it does not apply; empty for a failed reward."""
    tokens: Count
    finish_reason: FinishReason


class StepFinished(Message, frozen=True):
    """An optimizer step is done and its weights are published. Rank 0 reports for all ranks."""

    step: int
    """The step trained, from 0; the new policy version is step + 1."""
    groups: tuple[int, ...]
    manifest: WeightManifest
    metrics: LearnerMetrics
    times: TrainerTimes
    reward_terms: tuple[Finite | None, ...] = ()
    """Mean value of each reward function over the samples that it scored, None without any."""
    shown: tuple[ShownSample, ...] = ()
    """`run.print_samples` samples of the step, or all that rank 0 has."""


class CheckpointWritten(Message, frozen=True):
    """A checkpoint is complete on disk."""

    policy_version: int
    path: str


class CheckpointFailed(Message, frozen=True):
    """Writing a checkpoint failed. Training continues."""

    policy_version: int
    cause: CheckpointFault
    reason: str
    """Includes the path, and the bytes needed and free."""
    retry_version: int
    """The trainer tries again at this policy version, or when it ends."""


class TrainerReport(Message, frozen=True):
    """Sent once a second, so it also shows that the process is alive."""

    policy_version: int
    queued_trajectories: int
    busy_seconds: float


class DeliveryRefused(Message, frozen=True):
    """An ordered sample differs from its report, or cannot be trained on."""

    generator: str
    sample: SampleId
    reason: str


class PeerCutOff(Message, frozen=True):
    """The trainer stopped reading from a generator that sent too many refused frames."""

    generator: str
    reason: str


class SuspectSample(msgspec.Struct, frozen=True):
    """A context of a sample whose recorded log-probabilities nothing explains."""

    prompt_tokens: bytes
    """`[P]` int32"""
    tokens: bytes
    """`[L]` int32"""
    recorded: bytes
    """`[L]` float32, computed by the engine."""
    expected: bytes
    """`[L]` float32, computed by the trainer; 0 for an observed token."""
    observed: bytes = b""
    """`[L]` uint8, 0 or 1: observed tokens, which are not compared; empty: none."""


class WrongPolicyFound(Message, frozen=True):
    """Tokens do not follow their policy; trained on only with `run.on_wrong_policy: warn`."""

    found: WrongPolicy
    limit: float = 0.0
    """Mean difference of log-probabilities that rounding explains, in nats."""
    samples: tuple[SuspectSample, ...] = ()
    """The generator scores these again if the trainer cannot tell the cause."""
    provisional: bool = False
    """True if rounding may explain it: reported and trained on, without ending anything."""


class Failure(Message, frozen=True):
    """The process failed and is about to end."""

    reason: str
    user_error: bool


class Goodbye(Message, frozen=True):
    """The process ends on request."""


_OfStep = StepFinished | CheckpointWritten | CheckpointFailed
_OfGenerator = DeliveryRefused | PeerCutOff | WrongPolicyFound
FromTrainer = _OfStep | _OfGenerator | TrainerReady | TrainerReport | Failure | Goodbye
