"""Deltas of weights: bit for bit, never longer than what they replace, and any bytes are taken."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.wire.transport.decoding import FrameRefused
from asyncrl.wire.weights.delta import apply, encode

Bytes = st.binary(min_size=8, max_size=1600).map(lambda b: b[: len(b) // 8 * 8])


def rebuild(old: bytes, body: bytes | bytearray) -> bytes:
    target = np.frombuffer(old, np.uint8).copy()
    apply(target, body)
    return target.tobytes()


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """The second differs in any few words, of any distance and any change."""
    old = np.frombuffer(draw(Bytes) * draw(st.sampled_from([1, 40])), np.uint8)
    new = old.copy()
    for place in draw(st.lists(st.integers(0, len(old) - 1), max_size=60)):
        new[place] ^= draw(st.integers(0, 255))
    return old.tobytes(), new.tobytes()


@given(two_versions(), st.sampled_from([2, 4]))
def test_a_delta_rebuilds_every_bit(versions: tuple[bytes, bytes], word_bytes: int) -> None:
    old, new = versions
    body = encode(new, old, word_bytes)
    if body is not None:
        assert len(body) <= len(new)
        assert rebuild(old, body) == new


@given(Bytes, st.sampled_from([2, 4]), st.randoms(use_true_random=False))
def test_unrelated_bytes_are_no_delta(old: bytes, word_bytes: int, random: object) -> None:
    new = np.random.default_rng(len(old)).bytes(len(old))
    body = encode(new, old, word_bytes)
    assert body is None or rebuild(old, body) == new


@pytest.mark.parametrize(("dtype", "word_bytes"), [(np.uint16, 2), (np.uint32, 4)])
def test_few_changes_take_few_bytes(dtype: type, word_bytes: int) -> None:
    old = np.zeros(1 << 18, dtype)
    new = old.copy()
    changed = np.random.default_rng(0).choice(len(old), len(old) // 50, replace=False)
    new[changed] = 3
    body = encode(new.tobytes(), old.tobytes(), word_bytes)
    assert body is not None
    assert 2 * len(changed) < len(body) < 2.4 * len(changed)
    assert encode(old.tobytes(), old.tobytes(), word_bytes) == bytes([word_bytes])


@given(st.binary(max_size=80), Bytes)
def test_any_bytes_are_a_delta_or_refused(body: bytes, old: bytes) -> None:
    try:
        new = rebuild(old, body)
    except FrameRefused:
        return
    assert len(new) == len(old)
    assert body[0] in (2, 4)


@given(two_versions(), st.sampled_from([2, 4]), st.data())
def test_a_damaged_delta_changes_nothing_outside(
    versions: tuple[bytes, bytes], word_bytes: int, data: st.DataObject
) -> None:
    """Damage that looks like another delta is left to the chunk's checksum."""
    old, new = versions
    body = bytearray(encode(new, old, word_bytes) or b"\2")
    kept = bytes(old)
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameRefused):
        assert len(rebuild(old, body[: data.draw(st.integers(0, len(body)))])) == len(old)
    assert old == kept


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\3\0\1",  # no size of a word
        b"\2\0",  # no change after the gap
        b"\2\x80",  # a number cut short
        b"\2\0\0",  # a change of nothing
        b"\2\x04\1",  # behind the last word
        b"\2\0\x80\x80\x04",  # a change of 16 bits and more
        b"\2\xff\xff\xff\xff\xff\xff\xff\xff\x7f\1",  # a gap that no integer holds
    ],
)
def test_what_is_no_delta_is_refused(body: bytes) -> None:
    with pytest.raises(FrameRefused):
        rebuild(bytes(8), body)


def test_versions_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="8 bytes cannot be a change of 16"):
        encode(bytes(8), bytes(16), 2)
