from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from wire.frames import (
    DIGEST_BYTES,
    decode_tokens,
    decode_trajectory,
    digest_of,
    encode_tokens,
    encode_trajectory,
)
from wire.messages.data import TrajectoryDelivery


def trajectory() -> Trajectory:
    builder = TrajectoryBuilder(SampleId(3, 1), "add-17", np.array([5, 6], np.int32))
    for version, tokens in ((1, [7, 8]), (2, [9])):
        n = len(tokens)
        builder.append(
            tokens=np.array(tokens, np.int32),
            logprobs=np.linspace(-2, -1, n, dtype=np.float32),
            topk_ids=np.arange(2 * n, dtype=np.int32).reshape(n, 2),
            topk_logprobs=np.full((n, 2), -0.5, np.float32),
            noise_seeds=np.full(n, 17, np.uint64),
            provenance=np.full(n, Provenance.DRAFTED, np.uint8),
            policy_version=version,
        )
    return builder.finish("stop")


def delivery() -> TrajectoryDelivery:
    return encode_trajectory(trajectory(), reward=0.5, step=4)


def test_a_trajectory_survives_the_wire() -> None:
    sent = delivery()
    assert (sent.step, sent.reward) == (4, 0.5)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=TrajectoryDelivery)
    before, after = trajectory(), decode_trajectory(received)
    for name in ("id", "prompt_id", "segments", "finish_reason"):
        assert getattr(after, name) == getattr(before, name)
    for name in (
        "prompt_tokens", "tokens", "behaviour_logprobs", "topk_ids", "topk_logprobs", "provenance",
    ):  # fmt: skip
        expected, decoded = getattr(before, name), getattr(after, name)
        assert decoded.dtype == expected.dtype
        assert not decoded.flags.writeable
        np.testing.assert_array_equal(decoded, expected)


def test_arrays_are_not_copied() -> None:
    """Copies of long arrays cost more than their encryption (benchmarks.delivery)."""
    before = trajectory()
    sent = encode_trajectory(before, reward=0.0, step=0)
    body = msgspec.msgpack.encode(sent)
    after = decode_trajectory(msgspec.msgpack.decode(body, type=TrajectoryDelivery))
    whole = np.frombuffer(body, np.uint8)
    for name in ("tokens", "behaviour_logprobs", "topk_ids", "topk_logprobs", "provenance"):
        assert np.shares_memory(np.asarray(getattr(sent, name)), getattr(before, name))
        assert np.shares_memory(whole, getattr(after, name))


def test_arrays_of_another_layout_are_sent_as_the_wire_has_them() -> None:
    before = trajectory()
    other = replace(
        before,
        tokens=before.tokens.astype(">i4"),
        topk_logprobs=np.asfortranarray(before.topk_logprobs, np.float64),
    )
    assert encode_trajectory(other, reward=0.5, step=4) == delivery()


def test_the_digest_is_of_the_trajectory_only() -> None:
    sent = delivery()
    digest = digest_of(sent)
    assert len(digest) == DIGEST_BYTES
    assert digest == digest_of(msgspec.structs.replace(sent, step=9, reward=3.0, lineage=1))
    bytes_moved = msgspec.structs.replace(
        sent,
        prompt_tokens=memoryview(bytes(sent.prompt_tokens) + bytes(sent.tokens)[:4]),
        tokens=sent.tokens[4:],
    )
    assert digest_of(bytes_moved) != digest, "the same bytes, in other arrays"


def test_tokens_are_little_endian_int32() -> None:
    assert encode_tokens(np.array([1, 258], np.int32)) == b"\x01\0\0\0\x02\x01\0\0"
    assert decode_tokens(b"\x01\0\0\0\x02\x01\0\0").tolist() == [1, 258]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("behaviour_logprobs", b"\0" * 8, r"3\.1 has 3 tokens, but .* 2, 3 and 3"),
        ("provenance", b"\0", r"3\.1 has 3 tokens, but .* 3, 1 and 3"),
        ("topk_ids", b"\0" * 4, "reshape"),
        ("tokens", b"\0", "multiple of element size"),
        ("segments", (), r"3\.1 has no segments"),
    ],
)
def test_wrong_lengths_are_refused(field: str, value: object, message: str) -> None:
    broken = msgspec.structs.replace(delivery(), **{field: value})
    with pytest.raises(ValueError, match=message):
        decode_trajectory(broken)
