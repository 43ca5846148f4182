from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from asyncrl.rollout.trajectory import (
    Provenance,
    SampleId,
    Segment,
    Trajectory,
    TrajectoryBuilder,
    VerifiableTrajectory,
)
from asyncrl.wire.messages.data import (
    DIGEST_BYTES,
    TrajectoryDelivery,
    decode_tokens,
    decode_trajectory,
    digest_of,
    encode_tokens,
    encode_trajectory,
    max_delivery_bytes,
)


def trajectory(topk: int = 2) -> VerifiableTrajectory:
    builder = TrajectoryBuilder(SampleId(3, 1), "add-17", np.array([5, 6], np.int32))
    for version, tokens in ((1, [7, 8]), (2, [9])):
        n = len(tokens)
        builder.append(
            tokens=np.array(tokens, np.int32),
            logprobs=np.linspace(-2, -1, n, dtype=np.float32),
            topk_ids=np.arange(topk * n, dtype=np.int32).reshape(n, topk),
            topk_logprobs=np.full((n, topk), -0.5, np.float32),
            noise_seeds=np.full(n, 17, np.uint64),
            provenance=np.full(n, Provenance.DRAFTED, np.uint8),
            policy_version=version,
        )
    return replace(builder.finish("stop"), contexts=(2,))


def delivery() -> TrajectoryDelivery:
    return encode_trajectory(trajectory(), reward=0.5, step=4)


def test_a_trajectory_survives_the_wire() -> None:
    sent = delivery()
    assert (sent.step, sent.reward, sent.contexts) == (4, 0.5, (2,))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=TrajectoryDelivery)
    before, after = trajectory(), decode_trajectory(received)
    assert type(after) is Trajectory
    for name in ("id", "prompt_id", "segments", "finish_reason", "contexts"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("prompt_tokens", "tokens", "behaviour_logprobs", "provenance"):
        expected, decoded = getattr(before, name), getattr(after, name)
        assert decoded.dtype == expected.dtype
        assert not decoded.flags.writeable
        np.testing.assert_array_equal(decoded, expected)


def test_the_stored_top_k_does_not_travel() -> None:
    sizes = {
        len(msgspec.msgpack.encode(encode_trajectory(trajectory(topk), reward=0.5, step=4)))
        for topk in (0, 8, 64)
    }
    assert len(sizes) == 1
    long = replace(
        trajectory(),
        **{
            name: np.zeros(1000, dtype)
            for name, dtype in (
                ("tokens", np.int32),
                ("behaviour_logprobs", np.float32),
                ("provenance", np.uint8),
            )
        },
    )
    body = msgspec.msgpack.encode(encode_trajectory(long, reward=0.5, step=4))
    assert 9 * 1000 < len(body) < 9 * 1000 + 400, "nine bytes a token"
    assert len(body) < max_delivery_bytes(1000)


def test_arrays_are_not_copied() -> None:
    """Copies of long arrays cost more than their encryption (benchmarks.delivery)."""
    before = trajectory()
    sent = encode_trajectory(before, reward=0.0, step=0)
    body = msgspec.msgpack.encode(sent)
    after = decode_trajectory(msgspec.msgpack.decode(body, type=TrajectoryDelivery))
    whole = np.frombuffer(body, np.uint8)
    for name in ("tokens", "behaviour_logprobs", "provenance"):
        assert np.shares_memory(np.asarray(getattr(sent, name)), getattr(before, name))
        assert np.shares_memory(whole, getattr(after, name))


def test_arrays_of_another_layout_are_sent_as_the_wire_has_them() -> None:
    before = trajectory()
    other = replace(
        before,
        tokens=before.tokens.astype(">i4"),
        behaviour_logprobs=before.behaviour_logprobs.astype(np.float64),
    )
    assert encode_trajectory(other, reward=0.5, step=4) == delivery()


def test_the_digest_is_of_the_trajectory_only() -> None:
    sent = delivery()
    digest = digest_of(sent)
    assert len(digest) == DIGEST_BYTES
    assert digest == digest_of(msgspec.structs.replace(sent, step=9, reward=3.0, lineage=1))
    assert digest != digest_of(msgspec.structs.replace(sent, contexts=()))
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
        ("tokens", b"\0", "multiple of element size"),
        ("segments", (), r"3\.1 has no segments"),
        ("segments", (Segment(2, 0, 2),), r"3\.1 has 3 tokens, but .* 3, 3 and 2"),
    ],
)
def test_wrong_lengths_are_refused(field: str, value: object, message: str) -> None:
    broken = msgspec.structs.replace(delivery(), **{field: value})
    with pytest.raises(ValueError, match=message):
        decode_trajectory(broken)
