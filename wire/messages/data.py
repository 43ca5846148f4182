"""Generator to trainer: trajectories, and the answers back."""

from __future__ import annotations

import msgspec

from asyncrl.rollout.trajectory import FinishReason, SampleId, Segment
from asyncrl.wire.transport.decoding import Count, Finite


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages on the data plane."""


class TrajectoryDelivery(Message, frozen=True):
    """One trajectory with its reward. Sent again until a `Received` names its sample.

    `wire.messages.frames` encodes and decodes it. The stored top-K does not travel: only
    verification reads it. With L response tokens and P prompt tokens:
    """

    step: int
    sample: SampleId
    prompt_id: str
    prompt_tokens: memoryview
    """`[P]` int32; samples of a group need not have the same prompt"""
    tokens: memoryview
    """`[L]` int32"""
    behaviour_logprobs: memoryview
    """`[L]` float32"""
    provenance: memoryview
    """`[L]` uint8, `asyncrl.rollout.trajectory.Provenance`"""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    reward: float
    terms: tuple[Finite | None, ...] = ()
    """Value of each reward function, without its weight; None where one does not apply; empty if
    the reward failed and counts as 0. Only reported; training uses `reward`."""
    lineage: int = 0
    """Lineage of the trainer that it is for; another one must not train on it."""
    contexts: tuple[Count, ...] = ()


class Received(Message, frozen=True):
    """The trainer holds this sample. Sent for repeated deliveries too."""

    sample: SampleId
    lineage: int = 0


class SendAgain(Message, frozen=True):
    """The trainer takes this unacknowledged sample now; before its order there was no room."""

    sample: SampleId
    lineage: int = 0


FromGeneratorData = TrajectoryDelivery
ToGeneratorData = Received | SendAgain
