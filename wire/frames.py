"""Encode trajectories and token ids as bytes for the wire, and decode them.

All arrays travel as raw little-endian bytes: int32 for token ids, float32 for log-probabilities,
uint8 for provenance. This module owns that layout; every sender and receiver calls it.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from rollout.trajectory import FloatArray, IntArray, Trajectory
from wire.messages.data import TrajectoryDelivery

_INT32 = "<i4"
_FLOAT32 = "<f4"

DIGEST_BYTES = 16
"""Of the digest of a trajectory, in a report and in an order."""

_TOKEN_BYTES = 64
"""Bytes of a response token without its top-K, in a segment of its own."""
_HEAD_BYTES = 1 << 16
"""Bytes of a delivery without its tokens: names, ids and a prompt id of any usual length."""


def encode_tokens(tokens: IntArray) -> bytes:
    """Token ids of any shape as bytes."""
    return tokens.astype(_INT32).tobytes()


def decode_tokens(data: bytes) -> IntArray:
    """Token ids as a flat read-only view of the bytes.

    Raises:
        ValueError: the length is not a multiple of four bytes.
    """
    return np.frombuffer(data, _INT32)


def encode_floats(values: FloatArray) -> bytes:
    """Log-probabilities of any shape as bytes."""
    return values.astype(_FLOAT32).tobytes()


def decode_floats(data: bytes) -> FloatArray:
    """Log-probabilities as a flat read-only view of the bytes. Raises ValueError as above."""
    return np.frombuffer(data, _FLOAT32)


def max_delivery_bytes(*, tokens: int, topk: int) -> int:
    """Longest delivery of a run: `tokens` of prompt and response together, `topk` stored."""
    return tokens * (_TOKEN_BYTES + 8 * topk) + _HEAD_BYTES


def encode_trajectory(
    trajectory: Trajectory,
    *,
    reward: float,
    step: int,
    terms: tuple[float, ...] = (),
    lineage: int = 0,
) -> TrajectoryDelivery:
    """The message that delivers a trajectory to the trainer of this lineage for this step."""
    return TrajectoryDelivery(
        step=step,
        sample=trajectory.id,
        prompt_id=trajectory.prompt_id,
        prompt_tokens=encode_tokens(trajectory.prompt_tokens),
        tokens=encode_tokens(trajectory.tokens),
        behaviour_logprobs=encode_floats(trajectory.behaviour_logprobs),
        topk=int(trajectory.topk_ids.shape[1]),
        topk_ids=encode_tokens(trajectory.topk_ids),
        topk_logprobs=encode_floats(trajectory.topk_logprobs),
        provenance=trajectory.provenance.tobytes(),
        segments=trajectory.segments,
        finish_reason=trajectory.finish_reason,
        reward=reward,
        terms=terms,
        lineage=lineage,
    )


def digest_of(delivery: TrajectoryDelivery) -> bytes:
    """16 bytes that stand for the trajectory in a delivery, not its step and rewards (BLAKE2b)."""
    d = delivery
    head = (d.sample, d.prompt_id, d.topk, d.segments, d.finish_reason)
    arrays = (d.prompt_tokens, d.tokens, d.behaviour_logprobs, d.topk_ids, d.topk_logprobs)
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hashed.update(msgspec.msgpack.encode((head, [len(array) for array in arrays])))
    for array in (*arrays, d.provenance):
        hashed.update(array)
    return hashed.digest()


def decode_trajectory(delivery: TrajectoryDelivery) -> Trajectory:
    """The trajectory inside a delivery; its arrays are read-only views of the message.

    Raises:
        ValueError: the lengths of the arrays disagree, or there are no segments.
    """
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
        topk_ids=decode_tokens(delivery.topk_ids).reshape(length, delivery.topk),
        topk_logprobs=decode_floats(delivery.topk_logprobs).reshape(length, delivery.topk),
        provenance=np.frombuffer(delivery.provenance, np.uint8),
        segments=delivery.segments,
        finish_reason=delivery.finish_reason,
    )
    lengths = (
        len(trajectory.behaviour_logprobs),
        len(trajectory.provenance),
        trajectory.segments[-1].end,
    )
    if any(other != length for other in lengths):
        raise ValueError(
            f"trajectory {delivery.sample} has {length} tokens, but its log-probabilities, "
            f"provenance and segments cover {lengths[0]}, {lengths[1]} and {lengths[2]}"
        )
    return trajectory
