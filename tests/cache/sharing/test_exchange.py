"""Generators draft from each other's finished rollouts, also when some of them fail."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cache_check import check
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing import exchange
from asyncrl.cache.sharing import exchange as message
from asyncrl.cache.sharing.exchange import SharedCache, parse
from asyncrl.cache.sharing.ring import ExchangeRefused, RingReader, RingWriter
from asyncrl.cache.tree.rollout_tree import RolloutCache

PROMPT = np.array([101, 102, 103], np.int32)
CONFIG = CacheConfig(max_bytes=1 << 22, min_probability=0.0)
RING = 1 << 16


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def member(directory: Path, name: str, **more: object) -> SharedCache:
    settings = {"ring_bytes": RING, "clock": Clock()} | more
    return SharedCache(CONFIG, directory / "x", name, **settings)  # type: ignore[arg-type]


def finish(cache: SharedCache, key: str, tokens: list[int] | np.ndarray) -> None:
    row = cache.open(key, PROMPT)
    cache.extend(np.array([row]), np.asarray(tokens), np.array([0, len(tokens)]))
    cache.close(row)


def draft_tokens(cache: SharedCache, key: str) -> list[int]:
    row = cache.open(key, PROMPT)
    tokens: list[int] = cache.draft(np.array([row]), np.array([8])).tokens.tolist()
    cache.close(row)
    return tokens


def look(cache: SharedCache) -> None:
    """Let enough time pass for `cache` to look for new members."""
    cache.peers._clock.now += exchange.LOOK_EVERY  # type: ignore[attr-defined]
    cache.poll()


def counted(cache: SharedCache, counter: str) -> int:
    return sum(getattr(peer.reader, counter) for peer in cache.peers._peers.values())


def test_finished_rollouts_are_drafted_by_others_and_do_not_come_back(tmp_path: Path) -> None:
    a, b, c = (member(tmp_path, name) for name in "abc")
    for cache in (a, b, c):
        look(cache)
    row = a.open("p", PROMPT)
    a.extend(np.array([row]), np.array([5, 6, 7]), np.array([0, 3]))
    assert draft_tokens(b, "p") == []  # not finished yet
    a.close(row)
    for _ in range(3):
        assert draft_tokens(a, "p") == draft_tokens(b, "p") == draft_tokens(c, "p") == [5, 6, 7]
    for cache, received in ((a, 0), (b, 1), (c, 1)):
        assert cache.stats().sequences == 1
        assert cache.received_rollouts == received
        assert len(cache.peers) == 2
        assert cache.invalid_rollouts == counted(cache, "refused") == 0
        check(cache)
    assert a.published_tokens == 3
    assert b.published_tokens == 0


def test_peers_are_also_polled_when_no_request_starts(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    look(a)
    row = a.open("q", PROMPT)
    finish(b, "p", [1, 2, 3])
    for token in range(exchange.POLL_EVERY):
        assert a.stats().trees == 1
        a.extend(np.array([row]), np.array([token]), np.array([0, 1]))
    assert a.stats().trees == 2


def test_inserted_rollouts_and_empty_rows_are_not_published(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    look(b)
    a.insert("p", PROMPT, np.array([1, 2]))
    a.close(a.open("p", PROMPT))
    finish(a, "", [1, 2])
    assert b.poll() == 0
    assert a.unpublished_rollouts == 0


def test_members_that_join_late_or_restart_get_what_is_there(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    finish(a, "p", [1, 2, 3])
    finish(b, "q", [4, 5, 6])
    late = member(tmp_path, "c")
    late.poll()
    assert draft_tokens(late, "p") == [1, 2, 3]
    look(b)
    again = member(tmp_path, "a")  # as after a SIGKILL, without leave()
    again.poll()
    assert draft_tokens(again, "p") == [1, 2, 3]
    assert draft_tokens(again, "q") == [4, 5, 6]
    finish(a, "p", [7, 7, 7])  # the former member, still running: not received, and it notices
    look(a)
    assert len(a.peers) == 3  # it reads its successor as a peer
    finish(again, "r", [8, 9])
    look(b)
    assert draft_tokens(b, "r") == [8, 9]
    assert len(b.peers) == 2
    assert b.stats().trees == 4 - 1  # p, q, r


def test_a_former_member_of_the_same_name_warns_that_it_is_not_received(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = member(tmp_path, "a")
    second = member(tmp_path, "a")
    look(first)
    look(second)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "two members of one name" in caplog.text
    finish(first, "p", [1])
    assert first.unpublished_rollouts == 1
    finish(second, "p", [2, 3])
    assert draft_tokens(first, "p") == [2, 3] or first.stats().sequences == 2


def test_a_slow_reader_skips_what_was_overwritten(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    look(b)
    for index in range(200):
        finish(a, f"p{index}", np.arange(200))
    while b.poll():
        pass
    assert counted(b, "overtaken") > 0
    assert b.invalid_rollouts == counted(b, "refused") == 0
    assert 0 < b.received_rollouts < 200
    assert draft_tokens(b, "p199") == list(range(8))
    assert draft_tokens(b, "p0") == []
    check(b)


def test_one_poll_takes_a_bounded_amount_from_each_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "POLL_BYTES", 2000)
    a, b, c = (member(tmp_path, name) for name in "abc")
    look(c)
    for _ in range(10):
        finish(a, "a", np.arange(300))
    finish(b, "b", [1])
    taken = [c.poll() for _ in range(12)]
    assert max(taken) <= 601
    assert sum(taken) == 3001
    assert 1 in [t % 300 for t in taken[:2]]  # b did not wait for all of a


def test_rollouts_that_are_too_long_are_not_published(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    look(b)
    finish(a, "p", np.arange(RING // 16))
    finish(a, "k" * 70_000, [1])
    assert a.unpublished_rollouts == 2
    assert b.poll() == 0
    assert draft_tokens(a, "p") == list(range(8))


def test_leaving_ends_the_exchange_but_not_the_cache(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    finish(a, "p", [1, 2])
    a.leave()
    a.leave()
    finish(a, "p", [3, 4])
    look(b)
    assert draft_tokens(b, "p") == [1, 2]
    finish(b, "q", [5])
    assert a.poll() == 0


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "..", "a\0", "a" * 101, "ä"])
def test_impossible_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="a member's name"):
        member(tmp_path, name)


def test_a_directory_that_others_could_write_to_is_refused(tmp_path: Path) -> None:
    member(tmp_path, "a")
    (tmp_path / "x").chmod(0o750)
    with pytest.raises(ExchangeRefused, match="mode 0700, not drwxr-x---"):
        member(tmp_path, "a")
    (tmp_path / "x").chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(ExchangeRefused, match="not lrwx"):
        SharedCache(CONFIG, tmp_path / "link", "a")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ExchangeRefused, match="cannot create the exchange"):
        SharedCache(CONFIG, tmp_path / "file", "a")


def test_without_room_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ExchangeRefused, match="No space left on device"):
        member(tmp_path, "a")


def test_errors_of_files_end_the_exchange_with_that_peer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    look(b)

    def broken(*_: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(RingWriter, "write", broken)
    finish(a, "p", [1, 2])
    finish(a, "p", [1, 2])
    assert draft_tokens(a, "p") == [1, 2]
    assert a.unpublished_rollouts == 2
    monkeypatch.setattr(RingReader, "read", broken)
    b.poll()
    assert len(b.peers) == 0
    assert caplog.text.count("disk on fire") == 2
    look(a)
    assert len(a.peers) == 0  # its own abandoned ring is not a peer


def test_files_that_are_not_rings_are_ignored_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = member(tmp_path, "a")
    (tmp_path / "x" / "garbage.ring").write_bytes(b"?" * 5000)
    os.mkfifo(tmp_path / "x" / "pipe.ring")
    (tmp_path / "x" / "directory.ring").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("hello")
    for _ in range(3):
        look(a)
    assert len(a.peers) == 0
    assert sorted(r.levelname for r in caplog.records) == ["WARNING"] * 3


def test_rollouts_with_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b", vocabulary=200)
    look(b)
    finish(a, "p", [1, 200])
    finish(a, "p", [1, 199])
    b.poll()
    assert (b.invalid_rollouts, b.received_rollouts) == (1, 1)
    assert draft_tokens(b, "p") == [1, 199]


@settings(max_examples=300)
@given(st.data())
def test_forged_messages_are_refused_or_are_rollouts(data: st.DataObject) -> None:
    good = message._FIELDS.pack(1, 4, 6, 3) + b"p" + np.array([-1, 5, 6, 7, 8, 9], "<i4").tobytes()
    assert parse(good, 10) is not None
    forged = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        forged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(forged)), st.integers(0, len(forged))))
    parsed = parse(bytes(forged[:cut]) + data.draw(st.binary(max_size=4)), 10)
    if parsed is not None:
        _, _, response, _ = parsed
        cache = RolloutCache(CONFIG)
        cache.insert(*parsed)
        check(cache)
        assert len(response) > 0
        assert response.max() < 10


def test_a_rollout_keeps_its_version_and_a_shared_cache_drafts_trees(tmp_path: Path) -> None:
    a, b = member(tmp_path, "a"), member(tmp_path, "b")
    look(b)
    a.advance(5)
    finish(a, "p", [1, 2, 3])
    finish(a, "p", [1, 4, 5])
    b.advance(9)
    row = b.open("p", PROMPT)
    assert [s.versions.tolist() for s in b.finished_rollouts()] == [[5, 5]]
    tree = b.draft(np.array([row]), np.array([8]), branching=True, min_probability=0.0)
    assert sorted(tree.tokens.tolist()) == [1, 2, 3, 4, 5]
    b.extend(np.array([row]), np.array([6]), np.array([0, 1]))
    b.close(row)
    assert [s.versions.tolist() for s in b.finished_rollouts()] == [[5, 5, 9]]


WRITER = """
import sys, os
from pathlib import Path
import numpy as np
from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.exchange import SharedCache
directory, name, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
parent = os.getppid()
config = CacheConfig(max_bytes=1 << 20)
cache = SharedCache(config, directory, name, ring_bytes=1 << 18)
cache.advance(7)
for index in range(first, first + 1_000_000):
    tokens = np.random.default_rng(index).integers(0, 1000, index % 700 + 1)
    row = cache.open(f"{name} {index}", np.arange(3))
    cache.extend(np.array([row]), tokens, np.array([0, len(tokens)]))
    cache.close(row)
    if os.getppid() != parent:
        break  # never outlives the test
"""


@pytest.mark.slow
def test_processes_share_while_one_is_killed_while_writing(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    cache = SharedCache(CONFIG, directory, "reader", ring_bytes=RING)
    counts: Counter[str] = Counter()
    seen: list[tuple[str, int, np.ndarray]] = []
    insert = cache.insert

    def watched(key: str, context: np.ndarray, tokens: np.ndarray, version: int) -> None:
        name, index = key.split()
        counts[name] += 1
        seen.append((name, int(index), tokens))
        assert version == 7
        insert(key, context, tokens, version)

    cache.insert = watched  # type: ignore[method-assign]

    def start(name: str, first: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WRITER, directory, name, str(first)])

    def receive(**wanted: int) -> None:
        deadline = time.monotonic() + 300
        while any(counts[name] < number for name, number in wanted.items()):
            cache.poll()
            assert time.monotonic() < deadline, f"received {counts}, waited for {wanted}"

    writers = [start("a", 0), start("b", 0)]
    try:
        receive(a=100, b=100)
        writers[0].kill()
        writers[0].wait(60)
        receive(b=counts["b"] + 100)
        while cache.poll():
            pass
        before = counts["a"]
        writers.append(start("a", 5_000_000))
        receive(a=before + 100, b=counts["b"] + 100)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(60)
    assert max(index for name, index, _ in seen if name == "a") >= 5_000_000
    for name in "ab":
        indices = [index for other, index, _ in seen if other == name]
        assert indices == sorted(set(indices))  # in order, none twice
    for _, index, tokens in seen:
        expected = np.random.default_rng(index).integers(0, 1000, index % 700 + 1)
        assert tokens.tolist() == expected.tolist()
    assert cache.invalid_rollouts == counted(cache, "refused") == 0
    check(cache)
    assert sum(p.stat().st_size for p in directory.iterdir()) == RING + 64 + 2 * ((1 << 18) + 64)
