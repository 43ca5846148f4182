"""Controller to trainer."""

from __future__ import annotations

import msgspec

from asyncrl.rollout.trajectory import SampleId


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class StepPlan(Message, frozen=True):
    """The groups that a step trains on. Sent once per step, when the set is final.

    Each rank of the trainer is told its own groups, and has them all by then. It may have none.
    """

    step: int
    groups: tuple[int, ...]


class ExpectedSample(msgspec.Struct, frozen=True):
    """A finished sample as its generator reported it."""

    sample: SampleId
    length: int
    """Response tokens."""
    oldest_version: int
    """Lowest policy version among its segments."""
    digest: bytes
    """`asyncrl.wire.messages.frames.digest_of` its contents."""


class Expect(Message, frozen=True):
    """Samples that a generator is told to deliver; the trainer accepts no others.

    It is sent before the generator is told, and may come after the delivery all the same.
    """

    step: int
    """The step that trains on them."""
    generator: str
    samples: tuple[ExpectedSample, ...]


class Withdraw(Message, frozen=True):
    """A generator is lost. What it was told to deliver, and has not, is not accepted from it."""

    generator: str


class Configure(Message, frozen=True):
    """Settings that were changed while the run trains. Replaces those of earlier ones.

    What changes at a step is sent before the plan of that step.
    """

    config_json: str
    """The run's whole configuration."""


class WriteCheckpoint(Message, frozen=True):
    """Write a checkpoint of the present version, after the last step whose plan was sent.

    All ranks of a trainer are sent it between the same two plans.

    Answer with CheckpointWritten or CheckpointFailed, also if it is on the disk already.
    """


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""

    checkpoint: bool
    """Write a checkpoint first."""


ToTrainer = StepPlan | Expect | Withdraw | Configure | WriteCheckpoint | Shutdown
