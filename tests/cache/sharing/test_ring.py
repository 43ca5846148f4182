"""The ring file: readers get whole messages in order, despite kills, overwriting and damage."""

import os
import struct
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.cache.sharing import ring
from asyncrl.cache.sharing.ring import ExchangeRefused, RingReader, RingWriter

CAPACITY = 1 << 12


def drain(reader: RingReader, limit: int = 1 << 16) -> list[bytes]:
    out: list[bytes] = []
    while messages := reader.read(limit):
        out += messages
    return out


def text(index: int, size: int) -> bytes:
    return np.random.default_rng(index).bytes(size)


@settings(max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 1100)),
            st.tuples(st.just("read"), st.integers(0, 3000)),
        ),
        max_size=60,
    )
)
def test_readers_get_all_messages_that_were_not_overwritten(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    writer = RingWriter(path, CAPACITY)
    reader = RingReader(path)
    unread: deque[bytes] = deque()
    for index, (action, size) in enumerate(steps):
        if action == "write":
            message = text(index, size)
            taken = writer.write(message)
            assert (taken == 0) == (size > CAPACITY // 4 - 16)
            if taken:
                assert taken < size + 16 + 8
                unread.append(message)
        else:
            got = reader.read(size)
            if got and got[0] != unread[0]:  # then the oldest were overwritten, and that is counted
                assert reader.overtaken
                while unread[0] != got[0]:
                    unread.popleft()
            assert bool(got) == bool(unread)
            for message in got:
                assert message == unread.popleft()
    rest = drain(reader)
    assert rest == list(unread)[len(unread) - len(rest) :]
    newest = list(unread)[-2:]  # two of at most a quarter always fit
    assert rest[len(rest) - len(newest) :] == newest
    assert reader.refused == 0
    assert path.stat().st_size == 64 + CAPACITY
    # A later reader gets what is still there.
    late = drain(RingReader(path))
    assert late[len(late) - len(rest) :] == rest


def test_a_writer_killed_at_any_byte_leaves_only_whole_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    class KilledError(Exception):
        pass

    def life(allowed: int) -> bool:
        """Run one writer that is killed after `allowed` bytes; returns whether it was killed."""
        path = tmp_path / "a.ring"
        writer = RingWriter(path, CAPACITY)
        reader = RingReader(path)
        told = [text(i, 500) for i in range(9)]  # overwrites the ring once
        for message in told[:5]:
            writer.write(message)
        assert drain(reader) == told[:5]
        left = allowed

        def dying(file: int, data: bytes, at: int) -> int:
            nonlocal left
            real(file, data[:left], at)
            if len(data) > left:
                raise KilledError
            left -= len(data)
            return len(data)

        monkeypatch.setattr(ring.os, "pwrite", dying)
        died = False
        try:
            for message in told[5:]:
                writer.write(message)
        except KilledError:
            died = True
        monkeypatch.setattr(ring.os, "pwrite", real)
        got = drain(reader)
        assert got == told[5 : 5 + len(got)]
        second = RingReader(path)
        late = drain(second)
        # Torn marks hide everything. A real kill does not tear them: they are written at once.
        assert late or second._read_marks() is None
        assert late == told[5 + len(got) - len(late) : 5 + len(got)]
        assert reader.refused == second.refused == 0
        return died

    deaths = [life(allowed) for allowed in range(0, 2400, 11)]
    assert deaths[0]
    assert not deaths[-1]


# 240: messages start at the same offsets each time round the ring.
@pytest.mark.parametrize("size", [300, 240])
def test_a_reader_that_is_overtaken_while_copying_accepts_no_wrong_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "a.ring"
    writer = RingWriter(path, CAPACITY)
    told = [text(i, size) for i in range(40)]
    for message in told[:10]:
        writer.write(message)
    reader = RingReader(path)
    real = os.pread
    rest = iter(told[10:])

    def slow(file: int, size: int, at: int) -> bytes:
        data = real(file, size, at)
        for message in (next(rest, None) for _ in range(7)):
            if message is not None:
                writer.write(message)
        return data

    monkeypatch.setattr(ring.os, "pread", slow)
    got = [message for _ in range(30) for message in reader.read()]
    assert all(message in told for message in got)
    indices = [told.index(message) for message in got]
    assert indices == sorted(set(indices))
    assert indices[-1] == len(told) - 1
    assert reader.overtaken > 0
    assert reader.refused == 0


@settings(max_examples=150)
@given(st.data())
def test_damaged_bytes_are_never_accepted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    writer = RingWriter(path, CAPACITY)
    told = [text(i, 200) for i in range(12)]
    for message in told:
        writer.write(message)
    reader = RingReader(path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 70), st.integers(0, len(raw) - 8)))
        raw[at : at + 8] = data.draw(
            st.one_of(st.binary(min_size=8, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8)))
        )
    cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    path.write_bytes(raw[:cut])
    assert all(message in told for message in drain(reader))
    try:
        late = RingReader(path)
    except ExchangeRefused:
        return
    assert all(message in told for message in drain(late))


def test_damage_is_skipped_and_what_is_written_later_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    writer = RingWriter(path, CAPACITY)
    reader = RingReader(path)
    writer.write(b"first")
    writer.write(b"second")
    with path.open("r+b") as file:
        file.seek(64 + 16)
        file.write(b"F")
    assert reader.read() == []
    assert reader.refused == 1
    writer.write(b"third")
    assert reader.read() == [b"third"]


def test_a_new_writer_replaces_the_file_and_old_readers_keep_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    first = RingWriter(path, CAPACITY)
    reader = RingReader(path)
    second = RingWriter(path, CAPACITY)
    first.write(b"old")
    second.write(b"new")
    assert reader.read() == [b"old"]
    assert RingReader(path).read() == [b"new"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.ring"]


@pytest.mark.parametrize("capacity", [0, 4096 - 8, 4097, (1 << 30) + 8])
def test_impossible_capacities_are_refused(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        RingWriter(tmp_path / "a.ring", capacity)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_rings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    path.write_bytes(b"")
    with pytest.raises(ExchangeRefused, match="0 bytes"):
        RingReader(path)
    path.write_bytes(struct.pack("<8sIIQ", ring.MAGIC, 2, 0, CAPACITY))
    with pytest.raises(ExchangeRefused, match="format 2"):
        RingReader(path)
    path.write_bytes(struct.pack("<8sIIQ", ring.MAGIC, 1, 0, 1 << 62))
    with pytest.raises(ExchangeRefused, match="capacity 4611686018427387904"):
        RingReader(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ExchangeRefused, match="not a regular file"):
        RingReader(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        RingReader(path)


def test_without_room_there_is_no_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ring.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        RingWriter(tmp_path / "a.ring", CAPACITY)
    assert list(tmp_path.iterdir()) == []
