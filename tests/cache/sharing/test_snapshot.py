"""Snapshots: loading restores what was saved, and invalid files are refused with the reason."""

import hashlib
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from cache_check import check
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_caches import cache_of

from asyncrl.cache.config import CacheConfig, TreeRules
from asyncrl.cache.sharing import snapshot
from asyncrl.cache.sharing.snapshot import SnapshotRefused
from asyncrl.cache.tree.rollout_tree import RolloutCache

MODEL = "built-in 0.3M, vocabulary 64"
PROMPT = np.array([101, 102, 103], np.int32)

Rollouts = list[tuple[str, list[int], list[int], list[int]]]


def make(**settings: object) -> RolloutCache:
    defaults = {"max_bytes": 1 << 20, "min_probability": 0.0}
    return cache_of(**(defaults | settings))


def load(
    path: Path, config: CacheConfig, fingerprint: str, *, vocabulary: int = 2**31
) -> RolloutCache:
    cache = RolloutCache(config)
    snapshot.restore(path, cache, fingerprint, vocabulary=vocabulary)
    return cache


def content(cache: RolloutCache) -> Rollouts:
    """Keys, lengths, policy versions and flat tokens, in order of age."""
    return [
        (s.key, s.lengths.tolist(), s.versions.tolist(), s.tokens.tolist())
        for s in cache.finished_rollouts()
    ]


def filled() -> RolloutCache:
    cache = make()
    for key, tokens in (
        ("a", range(9)),
        ("b", [5]),
        ("ä\udcff\0", range(100)),
        ("a", [0, 2**31 - 1]),
    ):
        cache.insert(key, PROMPT, np.array(tokens))
    return cache


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "cache.rollouts"
    snapshot.save(filled(), path, MODEL)
    return path.read_bytes()


def signed(data: bytes) -> bytes:
    """The same bytes with a matching digest, as a bug or a forger would write them."""
    fields, rest = data[:32], data[64:]
    return fields + hashlib.blake2b(rest + fields, digest_size=32).digest() + rest


def refusal(tmp_path: Path, data: bytes, fingerprint: str = MODEL) -> str:
    path = tmp_path / "refused"
    path.write_bytes(data)
    with pytest.raises(SnapshotRefused) as caught:
        load(path, make().config, fingerprint)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_rollouts_their_order_and_the_drafts_are_restored(tmp_path: Path) -> None:
    cache, path = filled(), tmp_path / "cache"
    cache.close(cache.open("a", PROMPT))  # now the most recently used one
    assert snapshot.save(cache, path, MODEL) == path.stat().st_size
    loaded = load(path, cache.config, MODEL)
    check(loaded)
    assert content(loaded) == content(cache)
    assert [key for key, *_ in content(loaded)] == ["b", "ä\udcff\0", "a"]
    assert loaded.stats().bytes == cache.stats().bytes
    for key in ("a", "b", "ä\udcff\0"):
        drafts = [
            c.draft(np.array([c.open(key, PROMPT)]), np.array([16])).tokens.tolist()
            for c in (cache, loaded)
        ]
        assert drafts[0] == drafts[1] != []


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_any_cache_is_restored_also_with_other_budgets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = make(max_bytes=1 << 16, bytes_per_prompt=1 << 14, max_match=int(rng.integers(2, 41)))
    for _ in range(rng.integers(40)):
        context = rng.integers(0, 9, rng.integers(50))
        tokens, version = rng.integers(0, 9, rng.integers(300)), int(rng.integers(100))
        cache.insert(f"p{rng.integers(6)}", context, tokens, version)
    path = Path(_directory.name) / "cache"
    snapshot.save(cache, path, MODEL)
    same = RolloutCache(cache.config, cache.rules)
    snapshot.restore(path, same, MODEL)
    assert content(same) == content(cache)
    small = RolloutCache(CacheConfig(max_bytes=1 << 14), TreeRules(max_match=5))
    snapshot.restore(path, small, MODEL)
    check(small)
    assert small.stats().bytes <= 1 << 14
    kept = {key: len(lengths) for key, lengths, *_ in content(small)}
    order = [key for key, *_ in content(cache)]
    assert list(kept) == order[len(order) - len(kept) :]  # the most recently used prompts
    responses = {c: _responses(c) for c in (cache, small)}
    for key, count in kept.items():
        assert responses[small][key] == responses[cache][key][-count:]  # the newest rollouts


def _responses(cache: RolloutCache) -> dict[str, list[list[int]]]:
    return {
        s.key: [
            part[cache.rules.max_match :].tolist()
            for part in np.split(s.tokens, np.cumsum(s.lengths)[:-1])
        ]
        for s in cache.finished_rollouts()
    }


def test_running_rollouts_are_left_out(tmp_path: Path) -> None:
    cache = filled()
    row = cache.open("a", PROMPT)
    cache.extend(np.array([row]), np.array([7, 7]), np.array([0, 2]))
    snapshot.save(cache, tmp_path / "cache", MODEL)
    assert content(load(tmp_path / "cache", cache.config, MODEL)) == content(filled())


def test_an_empty_or_disabled_cache_is_saved_and_loaded(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "cache"
    snapshot.save(make(enabled=False), path, MODEL)
    assert content(load(path, make().config, MODEL)) == []
    path.write_bytes(saved)
    assert content(load(path, make(enabled=False).config, MODEL)) == []


def test_it_is_restored_only_into_an_empty_cache(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "cache"
    path.write_bytes(saved)
    cache = make()
    assert snapshot.restore(path, cache, MODEL) == 112
    with pytest.raises(ValueError, match="empty cache"):
        snapshot.restore(path, cache, MODEL)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing", cache.config, MODEL)


@pytest.mark.parametrize("fingerprint", ["", "x" * 4097])
def test_impossible_fingerprints_are_refused(tmp_path: Path, fingerprint: str) -> None:
    with pytest.raises(ValueError, match="1 to 4096 bytes"):
        snapshot.save(make(), tmp_path / "cache", fingerprint)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bytes
) -> None:
    path = tmp_path / "cache"
    snapshot.save(filled(), path, MODEL)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(snapshot.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        snapshot.save(make(), path, MODEL)
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]
    assert path.read_bytes() == saved


def test_another_model_is_refused(tmp_path: Path, saved: bytes) -> None:
    said = refusal(tmp_path, saved, "another model")
    assert MODEL in said
    assert "'another model'" in said


def test_another_format_is_refused(tmp_path: Path, saved: bytes) -> None:
    said = refusal(tmp_path, saved[:8] + b"\2" + saved[9:])
    assert "format 2, this version of asyncrl reads format 1" in said


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "cache"
    path.write_bytes(saved)
    with pytest.raises(SnapshotRefused, match="not below 64"):
        load(path, make().config, MODEL, vocabulary=64)


def test_any_cut_is_refused(tmp_path: Path, saved: bytes) -> None:
    for size in (*range(200), *range(200, len(saved), 7), len(saved) - 1):
        said = refusal(tmp_path, saved[:size])
        assert "truncated" in said or "not a snapshot" in said
    assert "something was appended" in refusal(tmp_path, saved + b"\0")


def test_any_flipped_bit_is_refused(tmp_path: Path, saved: bytes) -> None:
    rng = np.random.default_rng(0)
    for at in range(len(saved)):
        damaged = bytearray(saved)
        damaged[at] ^= 1 << int(rng.integers(8))
        refusal(tmp_path, bytes(damaged))


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(data: bytes, disguised: bool) -> None:
    start = snapshot.MAGIC + b"\1\0\0\0" if disguised else b""
    refusal(Path(_directory.name), start + data)


@settings(max_examples=200)
@given(st.data())
def test_a_forged_file_with_a_right_digest_is_refused_or_harmless(data: st.DataObject) -> None:
    """Numbers are replaced anywhere and the digest recomputed: no crash, no large allocation."""
    path = Path(_directory.name) / "forged"
    snapshot.save(filled(), path, MODEL)
    forged = bytearray(path.read_bytes())
    interesting = st.sampled_from([0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(12, len(forged) - 4))
        forged[at : at + 4] = data.draw(interesting).to_bytes(4, "little")
    path.write_bytes(signed(bytes(forged)))
    tracemalloc.start()
    try:
        cache = load(path, make().config, MODEL)
    except SnapshotRefused:
        pass
    else:
        check(cache)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20  # the arena's reserved megabyte, a chunk of the file, and little else


def test_every_inconsistency_under_a_right_digest_is_named(tmp_path: Path, saved: bytes) -> None:
    body = 64 + len(MODEL)

    def forged(at: int, value: int) -> str:
        return refusal(tmp_path, signed(saved[:at] + value.to_bytes(4, "little") + saved[at + 4 :]))

    assert "heads of 41" in forged(16, 41)
    assert "follow the last prompt" in forged(20, 2)
    assert "needs 16 bytes, and 0 are left" in forged(20, 4)
    assert "are left" in forged(body, 2**32 - 1)
    assert "a rollout without tokens" in forged(body + 4, 0)
    assert "no key" in forged(body, 0)
    assert "do not add up" in forged(body + 8, 1)
    assert "a token is negative" in forged(len(saved) - 4, 2**31)
    assert "version is negative" in forged(body + 16 + 1 + 4, 2**31)
    assert "key is not UTF-8" in refusal(
        tmp_path, signed(saved[: body + 16] + b"\xff" + saved[body + 17 :])
    )


@pytest.fixture(autouse=True, scope="module")
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> None:
    _directory.name = str(tmp_path_factory.mktemp("property"))


class _directory:  # noqa: N801 - hypothesis tests cannot use function-scoped fixtures
    name = ""
