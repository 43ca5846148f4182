"""Controller to trainer."""

import msgspec

from asyncrl.rollout.trajectory import SampleId


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class StepPlan(Message, frozen=True):
    """The groups that a step trains on. Sent once per step, when the set is final.

    Each rank of the trainer receives its own groups, possibly none, and has all of them by then.
    """

    step: int
    groups: tuple[int, ...]


class ExpectedSample(msgspec.Struct, frozen=True):
    """A finished sample as its generator reported it."""

    sample: SampleId
    length: int
    oldest_version: int
    digest: bytes
    """`asyncrl.wire.messages.data.digest_of` its contents."""


class Expect(Message, frozen=True):
    """Samples that a generator is about to deliver; the trainer accepts no others.

    It is sent before the order to the generator, but may still arrive after the delivery.
    """

    step: int
    generator: str
    samples: tuple[ExpectedSample, ...]


class Withdraw(Message, frozen=True):
    """A generator is lost: its outstanding deliveries are not accepted any more."""

    generator: str


class Configure(Message, frozen=True):
    """Settings that change while the run trains, replacing earlier ones, from the next plan on."""

    config_json: str


class WriteCheckpoint(Message, frozen=True):
    """Write a checkpoint of the present version, after the last step whose plan was sent.

    All ranks of a trainer receive it between the same two plans. Answer with CheckpointWritten or
    CheckpointFailed, also if it is on the disk already.
    """


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""

    checkpoint: bool


ToTrainer = StepPlan | Expect | Withdraw | Configure | WriteCheckpoint | Shutdown
