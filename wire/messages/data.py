"""Generator to trainer: trajectories as bytes, and the answers back.

All arrays travel as raw little-endian bytes: int32 for token ids, float32 for log-probabilities,
uint8 for provenance. They are not copied: a delivery refers to the trajectory's arrays, and the
arrays of a received one are views of the message.
"""

import hashlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import (
    FinishReason,
    FloatArray,
    IntArray,
    SampleId,
    SeedArray,
    Segment,
    Trajectory,
)
from asyncrl.wire.transport.decoding import Count, Finite


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages on the data plane."""


class TrajectoryDelivery(Message, frozen=True):
    """One trajectory with its reward. Sent again until a `Received` names its sample.

    The stored top-K does not travel: only verification reads it. With L response tokens and P
    prompt tokens:
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


_INT32 = "<i4"
_FLOAT32 = "<f4"
_UINT64 = "<u8"
_UINT8 = "u1"

DIGEST_BYTES = 16

_TOKEN_BYTES = 64
"""Bytes of a response token in a separate segment; without it, 9."""
_HEAD_BYTES = 1 << 16
"""Bytes of a delivery without its tokens: names, ids and a prompt id of any usual length."""


def encode_tokens(tokens: IntArray) -> bytes:
    """Encode token ids of any shape."""
    return tokens.astype(_INT32).tobytes()


def decode_tokens(data: bytes | memoryview) -> IntArray:
    """Decode token ids as a flat read-only view of the bytes, or raise ValueError."""
    return np.frombuffer(data, _INT32)


def encode_floats(values: FloatArray) -> bytes:
    """Encode log-probabilities of any shape."""
    return values.astype(_FLOAT32).tobytes()


def decode_floats(data: bytes | memoryview) -> FloatArray:
    """Decode log-probabilities as a flat read-only view. Raises ValueError as `decode_tokens`."""
    return np.frombuffer(data, _FLOAT32)


def encode_seeds(seeds: SeedArray) -> bytes:
    """Encode seeds of noise."""
    return seeds.astype(_UINT64).tobytes()


def decode_seeds(data: bytes | memoryview) -> SeedArray:
    """Decode seeds of noise as a flat read-only view of the bytes, or raise ValueError."""
    return np.frombuffer(data, _UINT64)


def max_delivery_bytes(tokens: int) -> int:
    """Return the longest delivery of a run with `tokens` of prompt and response together."""
    return tokens * _TOKEN_BYTES + _HEAD_BYTES


def encode_trajectory(
    trajectory: Trajectory,
    *,
    reward: float,
    step: int,
    terms: tuple[float | None, ...] = (),
    lineage: int = 0,
) -> TrajectoryDelivery:
    """Make the message that delivers a trajectory, whose arrays it refers to, to a trainer."""
    return TrajectoryDelivery(
        step=step,
        sample=trajectory.id,
        prompt_id=trajectory.prompt_id,
        prompt_tokens=_raw(trajectory.prompt_tokens, _INT32),
        tokens=_raw(trajectory.tokens, _INT32),
        behaviour_logprobs=_raw(trajectory.behaviour_logprobs, _FLOAT32),
        provenance=_raw(trajectory.provenance, _UINT8),
        segments=trajectory.segments,
        finish_reason=trajectory.finish_reason,
        contexts=trajectory.contexts,
        reward=reward,
        terms=terms,
        lineage=lineage,
    )


def digest_of(delivery: TrajectoryDelivery) -> bytes:
    """Return the first 16 bytes of a SHA-256 of the trajectory, without its step and rewards."""
    d = delivery
    head = (d.sample, d.prompt_id, d.segments, d.finish_reason, d.contexts)
    arrays = (d.prompt_tokens, d.tokens, d.behaviour_logprobs)
    hashed = hashlib.sha256(msgspec.msgpack.encode((head, [len(array) for array in arrays])))
    for array in (*arrays, d.provenance):
        hashed.update(array)
    return hashed.digest()[:DIGEST_BYTES]


def decode_trajectory(delivery: TrajectoryDelivery) -> Trajectory:
    """Return read-only views of the arrays. Raises ValueError if their lengths disagree."""
    if not delivery.segments:
        raise ValueError(f"trajectory {delivery.sample} has no segments")
    tokens = decode_tokens(delivery.tokens)
    length = len(tokens)
    trajectory = Trajectory(
        id=delivery.sample,
        prompt_id=delivery.prompt_id,
        prompt_tokens=decode_tokens(delivery.prompt_tokens),
        tokens=tokens,
        behaviour_logprobs=decode_floats(delivery.behaviour_logprobs),
        provenance=np.frombuffer(delivery.provenance, _UINT8),
        segments=delivery.segments,
        finish_reason=delivery.finish_reason,
        contexts=delivery.contexts,
    )
    logprobs, provenance = len(trajectory.behaviour_logprobs), len(trajectory.provenance)
    end = trajectory.segments[-1].end
    if not length == logprobs == provenance == end:
        raise ValueError(
            f"trajectory {delivery.sample} has {length} tokens, but its log-probabilities, "
            f"provenance and segments cover {logprobs}, {provenance} and {end}"
        )
    return trajectory


def _raw(values: NDArray[Any], dtype: str) -> memoryview:
    """Return the bytes of an array, copied only if it has another type or is not contiguous."""
    return np.ascontiguousarray(values, dtype).reshape(-1).view(_UINT8).data
